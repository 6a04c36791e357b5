// One grammar of `layers` and `steps`: what a recipe's checks accept, its schema allows and the plan
// resolves.
#include <nlohmann/json.hpp>
#include <regex>

#include "engine/recipe/tables.h"
#include "tests/unit/recipe_text.h"

namespace fp4t {
namespace {

using test::errors_of;
using test::minimal;

// Everything that is close to a matcher: numbers in all spellings, with all that may stand around them.
std::vector<std::string> near_misses() {
  std::vector<std::string> texts;
  const char* const numbers[] = {"0",
                                 "5",
                                 "12",
                                 "999999999999",
                                 "1000000000000",
                                 "007",
                                 "+5",
                                 "-5",
                                 " 5",
                                 "5 ",
                                 "1e3",
                                 "0x5",
                                 "1_000",
                                 "",
                                 "100",
                                 "101",
                                 "0.5",
                                 "12.5",
                                 "1.",
                                 ".5",
                                 "0.0000001",
                                 "0.0",
                                 "99.999999",
                                 "100.0",
                                 "100.5",
                                 "99999999999999999999"};
  for (const std::string a : numbers) {
    for (const char* percent : {"", "%", " %", "%%"}) {
      texts.push_back(a + percent);
      texts.push_back("first " + a + percent);
      texts.push_back("last " + a + percent);
      texts.push_back("first  " + a + percent);
      texts.push_back("last" + a + percent);
      for (const std::string b : {"0", "5", "90", "100", "1000000000000", "05", ""}) {
        texts.push_back(a + "-" + b + percent);
        texts.push_back(a + " - " + b + percent);
        texts.push_back(a + "%-" + b + percent);
        texts.push_back(b + "-" + a + percent);
        texts.push_back(a + "-" + b + "-" + b + percent);
      }
    }
  }
  for (const char* text :
       {"-", "%", "first", "last", "first ", "First 2", "all", "0-", "5-5", "0-0", "3,4", "0..3"}) {
    texts.emplace_back(text);
  }
  return texts;
}

bool is_only_order(const std::string& refusal) {
  return refusal.find("it runs backwards") != std::string::npos ||
         refusal.find("it holds no step") != std::string::npos;
}

TEST(recipe_matchers, the_schema_allows_what_the_reader_accepts_but_for_the_order) {
  const std::regex layers(kLayersPattern), steps(kStepsPattern);
  size_t accepted = 0;
  for (const std::string& text : near_misses()) {
    std::string refusal;
    const bool is_layers = read_layers(text, &refusal).has_value();
    if (is_layers || !is_only_order(refusal)) {
      EXPECT_EQ(std::regex_match(text, layers), is_layers) << text;
    }
    refusal.clear();
    const bool is_steps = read_steps(text, &refusal).has_value();
    if (is_steps || !is_only_order(refusal)) {
      EXPECT_EQ(std::regex_match(text, steps), is_steps) << text;
    }
    accepted += (is_layers ? 1 : 0) + (is_steps ? 1 : 0);
  }
  EXPECT_GT(accepted, 100u);  // the list holds good ones, too
}

TEST(recipe_matchers, the_readers_message_is_the_recipes) {
  for (const std::string& text : near_misses()) {
    if (text.empty() || text.front() == ' ' || text.back() == ' ') continue;
    std::string layers, steps;
    const bool is_layers = read_layers(text, &layers).has_value(),
               is_steps = read_steps(text, &steps).has_value();
    const std::string rule = "precision={pretrain.forward: [{format: bf16, ";
    const std::string of_layers = errors_of(minimal(), {rule + "layers: '" + text + "'}]}"});
    const std::string of_steps = errors_of(minimal(), {rule + "steps: '" + text + "'}]}"});
    const std::string at = "--set: precision.pretrain.forward[0].";
    EXPECT_EQ(of_layers, is_layers ? "" : at + "layers: " + layers) << text;
    EXPECT_EQ(of_steps, is_steps ? "" : at + "steps: " + steps) << text;
  }
}

TEST(recipe_matchers, refusals_say_why) {
  const auto layers = [](const std::string& text) {
    std::string refusal;
    EXPECT_FALSE(read_layers(text, &refusal)) << text;
    return refusal;
  };
  const auto steps = [](const std::string& text) {
    std::string refusal;
    EXPECT_FALSE(read_steps(text, &refusal)) << text;
    return refusal;
  };
  const auto expect_has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in " << text;
  };
  expect_has(layers("last 0"), "found last 0 (it asks for no layer); allowed: 5, 0-3, first 2");
  expect_has(layers("first 0.0%"), "it asks for no layer");
  expect_has(layers("9-2"), "it runs backwards");
  expect_has(layers("07"), "a leading zero");
  expect_has(layers("1234567890123"), "more than twelve digits");
  expect_has(layers("last 100.000001%"), "above 100");
  expect_has(layers("last 1.0000001%"), "one to six decimals");
  expect_has(layers("5 "), "goes on where it should end");
  expect_has(layers("-5"), "a number is missing");
  expect_has(steps("0-0"), "it holds no step");
  expect_has(steps("90-10%"), "it runs backwards");
  expect_has(steps("0-101%"), "above 100");
  expect_has(steps("0%-90%"), "it is no span");
  expect_has(steps("100"), "it is no span");
}

TEST(recipe_matchers, the_schema_takes_a_layer_written_as_a_number) {
  const nlohmann::json schema = nlohmann::json::parse(recipe_schema());
  const auto& rule = schema["properties"]["precision"]["properties"]["rl.sampler"]["items"]["properties"];
  EXPECT_EQ(rule["layers"]["anyOf"][0]["pattern"], kLayersPattern);
  EXPECT_EQ(rule["layers"]["anyOf"][1]["type"], "integer");
  EXPECT_EQ(rule["steps"]["pattern"], kStepsPattern);
}

}  // namespace
}  // namespace fp4t
