#include "engine/plan/machine_spec.h"

#include <algorithm>
#include <cmath>

#include "engine/plan/machine_texts.h"
#include "engine/recipe/bind.h"
#include "engine/recipe/yaml.h"
#include "kernels/base/check.h"
#include "kernels/base/text.h"
#include "kernels/base/text_file.h"

namespace fp4t {

namespace {

struct RateKey {
  const char *key, *help;
};
// By Rate.
constexpr RateKey kRateKeys[kNumRates] = {
    {"dense", "products of a matrix"},
    {"grouped_fprop", "products of experts, forward"},
    {"grouped_dgrad", "products of experts, gradient of their input"},
    {"grouped_wgrad", "products of experts, gradient of their weights"},
    {"coded_products", "products on block-scaled tensor cores, of their format's peak"},
    {"attention_forward", "attention"},
    {"attention_backward", "attention's gradient"},
    {"router", "router logits and their gradients, of the FP32 peak"},
    {"elementwise", "SwiGLU, sums, copies"},
    {"norm_forward", "RMSNorm"},
    {"norm_backward", "RMSNorm's gradient"},
    {"rotary", "rotary embedding with query and key norms"},
    {"permute", "rows of tokens to experts"},
    {"combine", "sums of experts' outputs, and their gradient"},
    {"loss", "log-probabilities and their gradient"},
    {"adamw", "the optimizer's update"},
    {"cached_attention", "attention over the cache"},
    {"few_rows", "decoding: products that read BF16 weights"},
    {"few_coded_rows", "decoding: products that read NVFP4 weights, up to 4 rows an expert"},
    {"some_coded_rows", "decoding: products that read NVFP4 weights, beyond 4 rows an expert"},
    {"quantise_row", "NVFP4 along rows"},
    {"quantise_column", "NVFP4 along columns"},
    {"quantise_both", "NVFP4 along rows and columns in one reading"},
    {"quantise_groups", "the same of experts' rows"},
    {"quantise_weight", "NVFP4 in tiles of 16x16, with the transpose"},
    {"quantise_four_over_six", "NVFP4 with two candidate scales"},
    {"quantise_ms_eden", "NVFP4 with MS-EDEN"},
    {"quantise_mxfp8", "MXFP8"},
    {"decode_codes", "codes to BF16"}};

constexpr double kMostFigure = 1e9;

Field figure_field(const char* key, const char* help) { return output(key, help).required(); }

void visit_figure(FieldVisitor& v, const Field& field, Figure& f, double low, double high) {
  if (!v.enter(field)) return;
  v.value(output("value", field.help).at_least(low).at_most(high).required(), f.value);
  v.value(output("source", "where the value comes from").required(), f.source);
  v.leave();
}

void visit_link(FieldVisitor& v, const Field& field, LinkSpec& s) {
  if (!v.enter(field)) return;
  const double low = 1e-6;
  visit_figure(v, figure_field("gb_s", "GB/s that a rank sends where all exchange with all"), s.gb_s, low,
               kMostFigure);
  visit_figure(v, figure_field("latency_us", "microseconds that a call takes besides its bytes"),
               s.latency_us, 0, kMostFigure);
  v.leave();
}

void visit_rates(FieldVisitor& v, MachineSpec& s) {
  if (!v.enter(
          output("shares", "what ops reach of the peak of their format, or of the memory rate").required()))
    return;
  for (size_t i = 0; i < kNumRates; ++i) {
    Field field = figure_field(kRateKeys[i].key, kRateKeys[i].help);
    if (static_cast<Rate>(i) == Rate::kCodedProducts) {
      field.only_if(s.has_coded_products(), "peaks.mxfp8_tflops or peaks.nvfp4_tflops is not 0");
    }
    visit_figure(v, field, s.rates[i], 1e-6, 2);  // reads from the L2 may pass the memory rate
  }
  v.leave();
}

}  // namespace

const char* name_of(Rate rate) { return kRateKeys[static_cast<size_t>(rate)].key; }

double MachineSpec::peak(Format format) const {
  switch (format) {
    case Format::kBf16:
      return bf16_tflops.value * 1e12;
    case Format::kFp32:
      return fp32_tflops.value * 1e12;
    case Format::kMxfp8:
      return mxfp8_tflops.value * 1e12;
    case Format::kNvfp4:
      return nvfp4_tflops.value * 1e12;
  }
  throw InternalError("a format without a name");
}

void visit_machine(FieldVisitor& v, MachineSpec& s) {
  v.value(output("name", "of the device").required(), s.name);
  v.value(output("backend", "what computes").one_of({"cuda", "cpu"}).required(), s.backend);
  v.value(output("arch", "compute capability x 10")
              .at_least(50)
              .at_most(999)
              .only_if(s.is_gpu(), "backend is cuda")
              .required(),
          s.arch);
  v.value(output("threads", "threads of a rank")
              .at_least(1)
              .at_most(1024)
              .only_if(!s.is_gpu(), "backend is cpu")
              .required(),
          s.threads);
  v.value(output("ranks_per_node", "ranks of one host").at_least(1).at_most(1024).required(),
          s.ranks_per_node);
  v.value(
      output("fast_domain", "consecutive ranks joined by the fast link").at_least(1).at_most(1e5).required(),
      s.fast_domain);
  if (v.enter(output("memory", "of a rank").required())) {
    visit_figure(v, figure_field("gib", "GiB that a run may use"), s.memory_gib, 1e-3, kMostFigure);
    visit_figure(v, figure_field("gb_s", "GB/s of a copy, read and written"), s.memory_gb_s, 1e-3,
                 kMostFigure);
    v.leave();
  }
  if (v.enter(output("peaks", "of products, dense").required())) {
    visit_figure(v, figure_field("bf16_tflops", "TFLOP/s"), s.bf16_tflops, 1e-6, kMostFigure);
    visit_figure(v, figure_field("fp32_tflops", "TFLOP/s, without tensor cores"), s.fp32_tflops, 1e-6,
                 kMostFigure);
    visit_figure(v, figure_field("mxfp8_tflops", "TFLOP/s; 0: codes are decoded to BF16"), s.mxfp8_tflops, 0,
                 kMostFigure);
    visit_figure(v, figure_field("nvfp4_tflops", "TFLOP/s; 0: codes are decoded to BF16"), s.nvfp4_tflops, 0,
                 kMostFigure);
    v.leave();
  }
  visit_figure(v, figure_field("sustained", "what products and attention keep of their speed alone"),
               s.sustained, 1e-3, 1);
  visit_figure(v, figure_field("op_us", "microseconds that an op takes besides its work"), s.op_us, 0, 1e6);
  visit_rates(v, s);
  if (v.enter(output("links", "between ranks").required())) {
    visit_link(v, output("fast", "inside a fast domain").required(), s.fast);
    visit_link(v, output("slow", "beyond it").required(), s.slow);
    v.leave();
  }
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const MachineText& t : kMachineTexts) names.emplace_back(t.name);
  return names;
}

MachineSpec parse_machine(const std::string& text, const std::string& file_name) {
  Problems problems;
  const YamlPtr root = parse_yaml(text, file_name, problems);
  if (problems.empty() && (!root || root->kind == YamlNode::Kind::kNull)) {
    problems.add({file_name, 1, 1}, "", "empty file; needed: the keys of a machine");
  }
  if (problems.empty() && (!root || root->kind != YamlNode::Kind::kMap)) {
    problems.add({file_name, 1, 1}, "", "a machine is a map of keys");
  }
  problems.throw_if_any();
  MachineSpec spec;
  FieldPlaces places;
  bind_document(
      *root, [&spec](FieldVisitor& v) { visit_machine(v, spec); }, places, problems);
  if (!problems.has_inside("fast_domain") && !problems.has_inside("ranks_per_node") &&
      spec.fast_domain % spec.ranks_per_node != 0 && spec.ranks_per_node % spec.fast_domain != 0) {
    problems.add_at(
        places, "fast_domain",
        detail::concat("found ", spec.fast_domain, "; allowed: a multiple or a divisor of ranks_per_node (",
                       spec.ranks_per_node, ")"));
  }
  problems.throw_if_any();
  return spec;
}

MachineSpec load_machine(const std::string& name_or_path) {
  if (name_or_path.find_first_of("/.") == std::string::npos) {
    for (const MachineText& t : kMachineTexts) {
      if (name_or_path == t.name)
        return parse_machine(t.text, detail::concat("configs/machines/", t.name, ".yaml"));
    }
    throw RecipeError(detail::concat("--machine ", printable(name_or_path), ": no machine of that name; ",
                                     suggestion(name_or_path, machine_names()), "; or the path of a file"));
  }
  const auto text = read_text_file_if_there(name_or_path);
  if (!text) throw MissingInputError("--machine " + printable(name_or_path) + ": no machine to read there");
  return parse_machine(*text, name_or_path);
}

Machine machine_of(const MachineSpec& spec) {
  Machine m;
  m.backend = spec.is_gpu() ? Backend::kCuda : Backend::kCpu;
  m.device_name = spec.name;
  m.arch = static_cast<int>(spec.arch);
  m.num_threads = static_cast<int>(spec.threads);
  m.memory_bytes = static_cast<int64_t>(std::floor(spec.memory_gib.value * 0x1p30));
  m.built_with_cuda = true;
  return m;
}

}  // namespace fp4t
