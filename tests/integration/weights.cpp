// Import, export and `model.from`, from the outside: round trips are exact, what does not fit is named.
#include <fstream>

#include "engine/store/safetensors.h"
#include "tests/support/cli.h"

namespace fp4t::test {
namespace {

namespace fs = std::filesystem;

std::string golden(const std::string& family) {
  return from_environment("FP4T_TEST_SOURCE") + "/tests/golden/hf/" + family;
}

std::string content_hash_of(const std::string& checkpoint) {
  const ScratchFolder elsewhere;  // a command leaves its output in the folder that it runs in
  const Exit e = run_binary(elsewhere.path(), {"inspect", checkpoint, "--verify"});
  EXPECT_EQ(e.code, 0) << e.errors;
  return last_line(e.output);
}

std::map<std::string, std::string> tensor_bytes_of(const std::string& folder) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors" || entry.path().filename() == "oracle.safetensors")
      continue;
    const SafetensorsFile file(entry.path());
    for (const StoredTensor& t : file.tensors()) {
      const std::vector<uint8_t> bytes = file.read(t);
      const bool fresh =
          out.emplace(t.name, t.dtype.name() + dims_text(t.dims) + std::string(bytes.begin(), bytes.end()))
              .second;
      EXPECT_TRUE(fresh) << t.name;
    }
  }
  return out;
}

class Weights : public ::testing::Test {
 protected:
  Exit run(const std::vector<std::string>& args) { return run_binary(folder_.path(), args); }
  void import_golden(const std::string& family, const std::string& to) {
    const Exit e = run({"import", "--from", golden(family), "--to", to});
    ASSERT_EQ(e.code, 0) << e.errors;
  }
  Exit export_to(const std::string& to, const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {"export", "--checkpoint", "ckpt", "--to", to};
    args.insert(args.end(), more.begin(), more.end());
    return run(args);
  }
  ScratchFolder folder_;
};

TEST_F(Weights, a_round_trip_gives_back_every_tensor_byte_for_byte) {
  for (const char* family : {"qwen3", "qwen3_moe", "mixtral", "llama"}) {
    const std::string f = family;
    import_golden(f, f + "_a");
    Exit e = run({"export", "--checkpoint", f + "_a", "--to", f + "_out"});
    ASSERT_EQ(e.code, 0) << e.errors;
    EXPECT_NE(e.output.find(": 0 values were rounded"), std::string::npos) << e.output;
    // The same names, types, shapes and bytes as the library's own file.
    const auto theirs = tensor_bytes_of(golden(f)), ours = tensor_bytes_of(folder_ / (f + "_out"));
    ASSERT_EQ(theirs.size(), ours.size()) << f;
    for (const auto& [name, bytes] : theirs)
      EXPECT_TRUE(ours.count(name) && ours.at(name) == bytes) << f << name;

    e = run({"import", "--from", f + "_out", "--to", f + "_b"});
    ASSERT_EQ(e.code, 0) << e.errors;
    EXPECT_EQ(content_hash_of(folder_ / (f + "_a")), content_hash_of(folder_ / (f + "_b"))) << f;
    const auto a = stored_bytes_of(folder_ / (f + "_a")), b = stored_bytes_of(folder_ / (f + "_b"));
    for (const auto& [name, bytes] : a) {
      if (name == "manifest.json") continue;  // it names the folder
      EXPECT_TRUE(b.count(name) && b.at(name) == bytes) << f << " " << name;
    }
    e = run({"export", "--checkpoint", f + "_b", "--to", f + "_again"});
    ASSERT_EQ(e.code, 0) << e.errors;
    EXPECT_EQ(stored_bytes_of(folder_ / (f + "_out")), stored_bytes_of(folder_ / (f + "_again"))) << f;
  }
}

TEST_F(Weights, large_models_are_cut_into_files_with_an_index) {
  import_golden("qwen3_moe", "ckpt");
  Exit e = export_to("out", {"--shard-size", "200KB"});
  ASSERT_EQ(e.code, 0) << e.errors;
  ASSERT_TRUE(fs::exists(folder_ / "out/model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(folder_ / "out/model.safetensors"));
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "out")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    EXPECT_LE(entry.file_size(), 220u << 10) << entry.path();
  }
  EXPECT_GE(files, 4);
  const auto index = nlohmann::json::parse(read_text(folder_ / "out/model.safetensors.index.json"));
  int64_t total = 0;
  const SafetensorsFile whole(golden("qwen3_moe") + "/model.safetensors");
  for (const StoredTensor& t : whole.tensors()) total += t.bytes();
  EXPECT_EQ(index["metadata"]["total_size"], total);
  EXPECT_EQ(tensor_bytes_of(folder_ / "out"), tensor_bytes_of(golden("qwen3_moe")));
  ASSERT_EQ(run({"import", "--from", "out", "--to", "again"}).code, 0);
  EXPECT_EQ(content_hash_of(folder_ / "ckpt"), content_hash_of(folder_ / "again"));
}

TEST_F(Weights, tokenizer_files_of_the_source_come_along) {
  fs::copy(golden("llama"), folder_ / "from");
  write_text(folder_ / "from/tokenizer_config.json", "{\"a\": 1}");
  write_text(folder_ / "from/merges.txt", "#version\n");
  write_text(folder_ / "from/notes.txt", "not for a reader");
  ASSERT_EQ(run({"import", "--from", "from", "--to", "ckpt"}).code, 0);
  EXPECT_ANSWER(export_to("out"), 0, "copied: generation_config.json, tokenizer_config.json, merges.txt");
  for (const char* name : {"tokenizer_config.json", "merges.txt", "generation_config.json"}) {
    EXPECT_EQ(read_text(folder_ / ("from/" + std::string(name))),
              read_text(folder_ / ("out/" + std::string(name))))
        << name;
  }
  EXPECT_FALSE(fs::exists(folder_ / "out/notes.txt"));
  const auto theirs = nlohmann::json::parse(read_text(golden("llama") + "/config.json"));
  const auto ours = nlohmann::json::parse(read_text(folder_ / "out/config.json"));
  EXPECT_TRUE(ours.at("pad_token_id").is_null());  // as theirs
  for (const char* key :
       {"bos_token_id", "eos_token_id", "hidden_size", "rms_norm_eps", "dtype", "head_dim"}) {
    EXPECT_EQ(ours[key], theirs[key]) << key;
  }
  // From a folder that the user names instead.
  fs::remove_all(folder_ / "from");
  write_text((fs::create_directory(folder_ / "other"), folder_ / "other/vocab.json"), "{}");
  EXPECT_ANSWER(export_to("out2", {"--tokenizer", "other"}), 0, "copied: vocab.json");
  EXPECT_ANSWER(export_to("out3"), 0, "no tokenizer files");
}

TEST_F(Weights, what_is_there_is_not_written_over) {
  import_golden("llama", "ckpt");
  EXPECT_ANSWER(run({"import", "--from", golden("llama"), "--to", "ckpt"}), 2,
                "'ckpt' is already there; --replace");
  EXPECT_ANSWER(run({"import", "--from", golden("llama"), "--to", "ckpt", "--replace"}), 0, "llama");
  ASSERT_EQ(export_to("out").code, 0);
  EXPECT_ANSWER(export_to("out"), 2, "'out' is already there; --replace");
  EXPECT_ANSWER(export_to("out", {"--replace", "--numbers", "fp32"}), 0, "numbers are fp32");
  // No folder of another kind goes away.
  fs::create_directory(folder_ / "home");
  write_text(folder_ / "home/letter.txt", "dear");
  EXPECT_ANSWER(export_to("home", {"--replace"}), 2, "no config.json");
  EXPECT_EQ(read_text(folder_ / "home/letter.txt"), "dear");
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_EQ(entry.path().filename().string().find(".tmp."), std::string::npos) << entry.path();
  }
}

TEST_F(Weights, an_imported_model_takes_its_table_from_a_preset) {
  import_golden("qwen3_moe", "ckpt");
  EXPECT_ANSWER(export_to("out", {"--format", "modelopt_nvfp4"}), 2, "no weight of the table is nvfp4");
  EXPECT_ANSWER(export_to("out", {"--format", "modelopt_nvfp4", "--preset", "rl_nvfp4"}), 0,
                "48 of 69 matrices are codes, as rl.sampler of rl_nvfp4");
  EXPECT_TRUE(fs::exists(folder_ / "out/hf_quant_config.json"));
  write_text(folder_ / "text.txt", "0 1 2 3\n254 255\n");
  EXPECT_ANSWER(export_to("out2", {"--format", "compressed_tensors_nvfp4", "--preset", "rl_nvfp4",
                                   "--calibrate", "text.txt"}),
                0, "from 2 sequences, 6 tokens of text.txt");
}

TEST_F(Weights, a_failed_export_leaves_nothing) {
  import_golden("llama", "ckpt");
  std::fstream file(folder_ / "ckpt/tensors-00001.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-9, std::ios::end);
  file.put('x');
  file.close();
  const Exit e = export_to("out");
  EXPECT_EQ(e.code, 65) << e.output;
  EXPECT_NE(e.errors.find("tensor 'model."), std::string::npos) << e.errors;
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_NE(entry.path().filename().string().substr(0, 3), "out") << entry.path();
  }
}

// Models from a folder -------------------------------------------------------------------------------

const std::string kOneStep = R"(stages:
  - pretrain:
      steps: 1
      batch: {tokens: 64, micro_sequences: 2, length: 32}
      data: [{name: sums, kind: sums, low: 0, high: 4}]
      optimizer: {learning_rate: 0}
)";

std::string from_recipe(const std::string& family, const std::string& more) {
  return "run: {name: continued, dir: run, threads: 2}\nmodel: {from: " + golden(family) + more + "}\n" +
         kOneStep;
}

class From : public Weights {
 protected:
  Exit with(const std::string& text, std::vector<std::string> args) {
    write_text(folder_ / "recipe.yaml", text);
    args.insert(args.end(), {"--config", "recipe.yaml"});
    return run(args);
  }
};

TEST_F(From, the_folders_shape_fills_in_the_recipe) {
  const Exit printed = with(from_recipe("qwen3_moe", ""), {"print-config"});
  ASSERT_EQ(printed.code, 0) << printed.errors;
  for (const char* line :
       {"layers: 2", "kv_heads: 2", "vocabulary: 257", "qk_norm: true", "experts: 8", "top_k: 2"}) {
    EXPECT_NE(printed.output.find(line), std::string::npos) << line << " in\n" << printed.output;
  }
  EXPECT_EQ(printed.output.find("init:"), std::string::npos) << printed.output;
  EXPECT_ANSWER(with(from_recipe("qwen3_moe", ", max_positions: 64, kv_heads: 2"), {"print-config"}), 0,
                "max_positions: 64");
  EXPECT_ANSWER(with(from_recipe("qwen3_moe", ""), {"plan"}), 0, "experts");
}

TEST_F(From, keys_that_differ_from_the_folder_are_all_named) {
  const Exit e = with(from_recipe("qwen3_moe", ", layers: 3, norm_eps: 1e-3, moe: {top_k: 4}"), {"validate"});
  EXPECT_EQ(e.code, 2);
  for (const char* words : {"recipe.yaml:2:", "model.layers: found 3; the model of '", "(model.from) has 2",
                            "model.norm_eps: found 0.001", "model.moe.top_k: found 4"}) {
    EXPECT_NE(e.errors.find(words), std::string::npos) << words << " in\n" << e.errors;
  }
}

TEST_F(From, folders_that_cannot_be_used_are_named) {
  EXPECT_ANSWER(with("model: {from: gone}\n" + kOneStep, {"validate"}), 66,
                "recipe.yaml:1:15: model.from: 'gone/config.json'");
  fs::create_directory(folder_ / "folder");
  write_text(folder_ / "folder/config.json", R"({"model_type": "gpt2"})");
  EXPECT_ANSWER(with("model: {from: folder}\n" + kOneStep, {"validate"}), 65,
                "model_type \"gpt2\" is not supported");
  // A plan reads the config alone; training needs the weights.
  fs::copy_file(golden("qwen3_moe") + "/config.json", folder_ / "folder/config.json",
                fs::copy_options::overwrite_existing);
  EXPECT_ANSWER(with("model: {from: folder}\n" + kOneStep, {"validate"}), 66,
                "recipe.yaml:1:15: model.from: cannot open 'folder/model.safetensors'");
  EXPECT_ANSWER(with("model: {from: folder}\n" + kOneStep, {"plan"}), 0, "parameters");
  EXPECT_ANSWER(with("model: {from: folder}\n" + kOneStep, {}), 66, "model.safetensors");
}

// With a learning rate of 0 the checkpoint holds what was imported.
TEST_F(From, training_begins_with_the_folders_weights_under_the_precision_table) {
  import_golden("qwen3_moe", "ckpt");
  const auto imported = tensor_hashes_of(folder_ / "ckpt", "model.");
  ASSERT_FALSE(imported.empty());
  const std::string table = "precision: {preset: quartet2}\n";
  Exit e = with(table + from_recipe("qwen3_moe", ""), {});
  ASSERT_EQ(e.code, 0) << e.errors;
  EXPECT_EQ(tensor_hashes_of(latest_checkpoint_of(folder_ / "run"), "model."), imported);
  EXPECT_NE(read_text(folder_ / "run/kernels.txt").find("nvfp4"), std::string::npos);
  EXPECT_NE(read_text(folder_ / "run/log.txt").find("weights from "), std::string::npos);

  // The checkpoint stands by itself: what made it may be gone.
  const std::string text = read_text(folder_ / "recipe.yaml");
  e = run({"generate", "--checkpoint", "run", "--prompt", "1+", "--max-tokens", "2", "--temperature", "0"});
  EXPECT_EQ(e.code, 0) << e.errors;

  // The folder is part of the run's identity.
  fs::create_directory(folder_ / "copy");
  for (const char* name : {"config.json", "model.safetensors"}) {
    fs::copy_file(golden("qwen3_moe") + "/" + name, folder_ / ("copy/" + std::string(name)));
  }
  e = with(table + "run: {name: continued, dir: run, threads: 2}\nmodel: {from: copy}\n" + kOneStep, {});
  EXPECT_EQ(e.code, 2) << e.errors;
  EXPECT_NE(e.errors.find("model.from"), std::string::npos) << e.errors;
}

TEST_F(From, reinforcement_learning_begins_with_the_folders_weights) {
  const std::string rl = R"(stages:
  - rl:
      steps: 1
      task: {kind: sums, low: 0, high: 4}
      sampling: {prompts: 2, samples: 2, max_tokens: 3}
      objective: {drop_zero_advantage: false}
      optimizer: {learning_rate: 0}
)";
  import_golden("qwen3_moe", "ckpt");
  const Exit e = with("run: {name: continued, dir: run, threads: 2}\nmodel: {from: " + golden("qwen3_moe") +
                          "}\nprecision: {preset: rl_nvfp4}\n" + rl,
                      {});
  ASSERT_EQ(e.code, 0) << e.errors;
  EXPECT_EQ(tensor_hashes_of(latest_checkpoint_of(folder_ / "run"), "model."),
            tensor_hashes_of(folder_ / "ckpt", "model."));
}

// Its tokenizer ------------------------------------------------------------------------------------------

// A copy of the golden Qwen3-MoE with rows for the tokens of a small tokenizer.json, and that file.
void with_tokenizer(const std::string& folder) {
  fs::create_directory(folder);
  auto config = nlohmann::json::parse(read_text(golden("qwen3_moe") + "/config.json"));
  constexpr int64_t kRows = 432;
  config["vocab_size"] = kRows;
  write_text(folder + "/config.json", config.dump());
  fs::copy_file(from_environment("FP4T_TEST_SOURCE") + "/tests/golden/tokenizers/qwen.json",
                folder + "/tokenizer.json");
  const SafetensorsFile file(golden("qwen3_moe") + "/model.safetensors");
  std::map<std::string, std::vector<uint8_t>> data;
  std::vector<TensorToStore> list;
  for (const StoredTensor& t : file.tensors()) {
    std::vector<int64_t> dims = t.dims;
    data[t.name] = file.read(t);
    if (dims[0] == 257) dims[0] = kRows;
    data[t.name].resize(static_cast<size_t>(stored_bytes(t.dtype, dims)));
    list.push_back({t.name, t.dtype, dims, nullptr});
  }
  for (TensorToStore& t : list) t.data = data.at(t.name).data();
  write_safetensors(folder + "/model.safetensors", list, {});
}

TEST_F(From, a_folder_brings_its_tokenizer) {
  with_tokenizer(folder_ / "folder");
  const std::string recipe = "run: {name: t, dir: run, threads: 2}\nmodel: {from: folder}\n" + kOneStep;
  Exit e = with(recipe, {"print-config"});
  ASSERT_EQ(e.code, 0) << e.errors;
  EXPECT_NE(e.output.find("kind: json"), std::string::npos) << e.output;
  EXPECT_NE(e.output.find("path: folder/tokenizer.json"), std::string::npos) << e.output;
  // Rows beyond the tokenizer's stay.
  EXPECT_NE(e.output.find("vocabulary: 432"), std::string::npos) << e.output;
  // Beside other keys of the section, too.
  write_text(folder_ / "folder/tokenizer_config.json", R"({"chat_template": "<|im_start|>{{x}}<|im_end|>"})");
  e = with(recipe + "tokenizer: {chat: auto}\n", {"print-config"});
  EXPECT_NE(e.output.find("path: folder/tokenizer.json"), std::string::npos) << e.output << e.errors;
  EXPECT_NE(e.output.find("chat: chatml"), std::string::npos) << e.output << e.errors;
  e = with(recipe + "tokenizer: {kind: bytes}\n", {"print-config"});
  EXPECT_NE(e.output.find("kind: bytes"), std::string::npos) << e.output << e.errors;

  ASSERT_EQ(run({"import", "--from", "folder", "--to", "ckpt"}).code, 0);
  e = run(
      {"generate", "--checkpoint", "ckpt", "--prompt", "the cat", "--max-tokens", "2", "--temperature", "0"});
  EXPECT_EQ(e.code, 0) << e.errors;
  EXPECT_ANSWER(export_to("out"), 0, "copied: tokenizer.json");
  EXPECT_EQ(read_text(folder_ / "out/tokenizer.json"), read_text(folder_ / "folder/tokenizer.json"));
}

TEST_F(From, an_imported_model_chats_in_the_form_of_its_template) {
  with_tokenizer(folder_ / "folder");
  ASSERT_EQ(run({"import", "--from", "folder", "--to", "ckpt"}).code, 0);
  const std::vector<std::string> chat = {"generate", "--checkpoint", "ckpt",         "--prompt",
                                         "hi",       "--chat",       "--max-tokens", "2"};
  EXPECT_ANSWER(run(chat), 66, "folder/tokenizer_config.json");
  write_text(folder_ / "folder/tokenizer_config.json", R"({"chat_template": "none that is known"})");
  EXPECT_ANSWER(run(chat), 65, "is none of chatml, llama3 and mistral");
  write_text(folder_ / "folder/tokenizer_config.json", R"({"chat_template": "<|im_start|>{{x}}<|im_end|>"})");
  EXPECT_ANSWER(run(chat), 0, "");
}

TEST_F(From, a_sentencepiece_model_comes_before_its_conversion) {
  with_tokenizer(folder_ / "folder");
  fs::copy_file(from_environment("FP4T_TEST_SOURCE") + "/tests/golden/tokenizers/unigram.model",
                folder_ / "folder/tokenizer.model");
  const Exit e = with("model: {from: folder}\n" + kOneStep, {"print-config"});
  EXPECT_EQ(e.code, 0) << e.errors;
  EXPECT_NE(e.output.find("path: folder/tokenizer.model"), std::string::npos) << e.output;
}

TEST_F(From, a_tokenizer_that_cannot_be_read_is_left_out_only_if_asked_for) {
  with_tokenizer(folder_ / "folder");
  const std::string whole = read_text(folder_ / "folder/tokenizer.json");
  auto tokenizer = nlohmann::json::parse(whole);
  tokenizer["model"]["type"] = "Unigram";
  for (const std::string& bad : {tokenizer.dump(), whole.substr(0, whole.size() / 2)}) {
    write_text(folder_ / "folder/tokenizer.json", bad);
    EXPECT_ANSWER(run({"import", "--from", "folder", "--to", "ckpt"}), 65,
                  "--no-tokenizer imports the weights alone");
    EXPECT_FALSE(fs::exists(folder_ / "ckpt"));
    EXPECT_NE(with("model: {from: folder}\n" + kOneStep, {"validate"}).code, 0);
  }
  EXPECT_ANSWER(run({"import", "--from", "folder", "--to", "ckpt", "--no-tokenizer"}), 0,
                "texts are numbers of tokens");
}

TEST_F(From, a_folder_that_no_recipe_can_have_is_named) {
  with_tokenizer(folder_ / "folder");
  auto config = nlohmann::json::parse(read_text(folder_ / "folder/config.json"));
  config["num_hidden_layers"] = 100000;
  write_text(folder_ / "folder/config.json", config.dump());
  const Exit e = run({"import", "--from", "folder", "--to", "ckpt"});
  EXPECT_EQ(e.code, 65) << e.errors;
  EXPECT_NE(e.errors.find("'folder' holds no model of this program: model.layers: found 100000"),
            std::string::npos)
      << e.errors;
}

TEST_F(From, validate_looks_at_the_weights) {
  with_tokenizer(folder_ / "folder");
  const std::string recipe = "run: {name: t, dir: run, threads: 2}\nmodel: {from: folder}\n" + kOneStep;
  EXPECT_EQ(with(recipe, {"validate"}).code, 0);
  fs::resize_file(folder_ / "folder/model.safetensors",
                  fs::file_size(folder_ / "folder/model.safetensors") - 1000);
  EXPECT_ANSWER(with(recipe, {"validate"}), 65, "model.safetensors': tensor");
}

// The tokenizer's files of an export are those of the model.
TEST_F(From, an_export_takes_a_tokenizer_that_has_moved_and_no_other) {
  with_tokenizer(folder_ / "folder");
  ASSERT_EQ(run({"import", "--from", "folder", "--to", "ckpt"}).code, 0);
  fs::rename(folder_ / "folder", folder_ / "moved");
  fs::remove(folder_ / "moved/config.json");
  write_text(folder_ / "text.txt", "the cat\n");
  EXPECT_ANSWER(export_to("out", {"--tokenizer", "moved"}), 0, "copied: tokenizer.json");
  // A reader takes its family's numbers of special tokens for what is not written.
  const auto config = nlohmann::json::parse(read_text(folder_ / "out/config.json"));
  EXPECT_TRUE(config.at("bos_token_id").is_null());
  EXPECT_EQ(config.at("eos_token_id"), 416);
  EXPECT_ANSWER(
      export_to("codes", {"--tokenizer", "moved", "--format", "modelopt_nvfp4", "--preset", "nvidia_nvfp4",
                          "--table", "pretrain.forward", "--calibrate", "text.txt"}),
      0, "tokens of text.txt");
  auto tokenizer = nlohmann::json::parse(read_text(folder_ / "moved/tokenizer.json"));
  tokenizer["model"]["ignore_merges"] = !tokenizer["model"].value("ignore_merges", false);
  write_text(folder_ / "moved/tokenizer.json", tokenizer.dump());
  EXPECT_ANSWER(export_to("out2", {"--tokenizer", "moved"}), 65, "another tokenizer");
}

TEST_F(Weights, what_has_no_effect_on_an_export_is_refused) {
  import_golden("qwen3_moe", "ckpt");
  for (const char* option : {"--table=rl.sampler", "--preset=rl_nvfp4", "--calibrate=nowhere.txt"}) {
    EXPECT_ANSWER(export_to("out", {option}), 2, "has no effect with --format hf");
  }
  EXPECT_ANSWER(export_to("out", {"--tokenizer", "nowhere"}), 66, "--tokenizer: 'nowhere' is no folder");
  EXPECT_ANSWER(export_to("out", {"--shard-size", "0"}), 2, "--shard-size");
  const std::vector<std::string> codes = {"--format", "modelopt_nvfp4", "--preset", "rl_nvfp4"};
  const auto with_codes = [&](std::vector<std::string> more) {
    more.insert(more.end(), codes.begin(), codes.end());
    return export_to("out", more);
  };
  write_text(folder_ / "text.txt", "1 2\n3 x\n");
  EXPECT_ANSWER(with_codes({"--calibrate", "text.txt"}), 65, "text.txt:2: 'x' is no token");
  EXPECT_ANSWER(with_codes({"--calibrate", "."}), 65, "no regular file");
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  EXPECT_ANSWER(with_codes({}), 0, "tokens of random numbers, as the recipe names no text");
}

// What no family has ---------------------------------------------------------------------------------

TEST_F(Cli, an_export_without_a_family_is_refused_by_name) {
  EXPECT_ANSWER(look({"export", "--checkpoint", "run", "--to", "out"}), 2,
                "router.bias' is not zero (model.moe.balance.bias_rate): mixtral");
  EXPECT_FALSE(fs::exists(*done_ / "out"));
}

}  // namespace
}  // namespace fp4t::test
