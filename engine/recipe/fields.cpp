// Keys outside the stages.
#include "engine/recipe/fields.h"

#include "engine/recipe/tables.h"

namespace fp4t {

namespace {

// An enum of kernels/formats as a choice; `count` values from 0 on, named by name_of.
template <class E>
void enum_value(FieldVisitor& v, Field field, E& e, int count) {
  for (int i = 0; i < count; ++i) field.choices.emplace_back(name_of(static_cast<E>(i)));
  size_t index = static_cast<size_t>(e);
  v.choice(field, index);
  e = static_cast<E>(index);
}

void dtype_value(FieldVisitor& v, Field field, DType& t) {
  field.one_of({"fp32", "bf16"});
  size_t index = t == DType::kBf16 ? 1 : 0;
  v.choice(field, index);
  t = index == 1 ? DType::kBf16 : DType::kF32;
}

void visit_rope(FieldVisitor& v, RopeSpec& s) {
  const bool scaled = s.scaling != "none";
  v.value(identity("theta", "base of the rotary frequencies").at_least(1).at_most(kMostReal), s.theta);
  v.value(identity("scaling", "how the frequencies are stretched for longer contexts")
              .one_of({"none", "linear", "llama3", "yarn"}),
          s.scaling);
  v.value(identity("factor", "context extension: new length over trained length")
              .at_least(1)
              .at_most(1e6)
              .only_if(scaled, "scaling is linear, llama3 or yarn"),
          s.factor);
  v.value(identity("low_freq_factor", "wavelengths longer than original_positions over this are divided")
              .above(0)
              .at_most(1e6)
              .only_if(s.scaling == "llama3", "scaling is llama3"),
          s.low_freq_factor);
  v.value(identity("high_freq_factor", "wavelengths shorter than original_positions over this stay")
              .above(0)
              .at_most(1e6)
              .only_if(s.scaling == "llama3", "scaling is llama3"),
          s.high_freq_factor);
  v.value(identity("beta_fast", "rotations over original_positions above which a frequency stays")
              .above(0)
              .at_most(1e6)
              .only_if(s.scaling == "yarn", "scaling is yarn"),
          s.beta_fast);
  v.value(identity("beta_slow", "rotations over original_positions below which a frequency is divided")
              .above(0)
              .at_most(1e6)
              .only_if(s.scaling == "yarn", "scaling is yarn"),
          s.beta_slow);
  v.value(identity("original_positions", "positions that the base model was trained for")
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(s.scaling == "llama3" || s.scaling == "yarn", "scaling is llama3 or yarn")
              .required(),
          s.original_positions);
}

void visit_balance(FieldVisitor& v, BalanceSpec& s) {
  v.value(course("bias_rate", "step of the selection bias that evens out expert load; 0: off")
              .at_least(0)
              .at_most(kMostFactor),
          s.bias_rate);
  v.value(course("aux_loss", "coefficient of the load-balance loss; 0: off").at_least(0).at_most(kMostFactor),
          s.aux_loss);
  v.value(course("z_loss", "coefficient of the router's z-loss; 0: off").at_least(0).at_most(kMostFactor),
          s.z_loss);
}

void visit_moe(FieldVisitor& v, MoeSpec& s) {
  const bool on = s.experts > 0;
  const char* with_experts = "experts is at least 1";
  v.value(
      identity("experts", "routed experts a layer; 0: every layer is dense").at_least(0).at_most(kMostHeads),
      s.experts);
  v.value(identity("top_k", "experts that a token goes to").at_least(1).only_if(on, with_experts).required(),
          s.top_k);
  v.value(identity("hidden", "FFN width of one expert")
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(on, with_experts)
              .required(),
          s.hidden);
  v.value(identity("shared_experts", "experts that every token goes to")
              .at_least(0)
              .at_most(kMostHeads)
              .only_if(on, with_experts),
          s.shared_experts);
  v.value(identity("shared_hidden", "FFN width of one shared expert; default: hidden")
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(on, with_experts)
              .only_if(s.shared_experts > 0, "shared_experts is at least 1"),
          s.shared_hidden);
  v.value(identity("dense_layers", "the first layers that are dense, of width model.mlp_hidden")
              .at_least(0)
              .only_if(on, with_experts),
          s.dense_layers);
  v.value(identity("router", "how router scores become gates")
              .one_of({"softmax", "sigmoid"})
              .only_if(on, with_experts),
          s.router);
  v.value(identity("normalise", "divide a token's gates by their sum").only_if(on, with_experts),
          s.normalise);
  v.value(identity("gate_scale", "factor on the gates")
              .at_least(1e-6)
              .at_most(kMostFactor)
              .only_if(on, with_experts),
          s.gate_scale);
  if (v.enter(course("balance", "how expert load is evened out").only_if(on, with_experts))) {
    visit_balance(v, s.balance);
    v.leave();
  }
}

void visit_init(FieldVisitor& v, InitSpec& s) {
  v.value(identity("kind", "distribution of the first weights").one_of({"normal"}), s.kind);
  v.value(identity("std", "standard deviation of every matrix").at_least(1e-9).at_most(1e3), s.std);
  v.value(identity("scale_residual", "attn.out and every down projection by 1/sqrt(2 layers)"),
          s.scale_residual);
}

}  // namespace

void visit_run(FieldVisitor& v, RunSpec& s) {
  v.value(output("name", "name of the run").one_line(), s.name);
  v.value(output("dir", "run folder; default: runs/NAME"), s.dir);
  v.value(identity("seed", "seed of everything random"), s.seed);
  v.value(layout("device", "where the arithmetic runs").one_of({"auto", "cpu", "cuda"}), s.device);
  v.value(layout("threads", "CPU threads; 0: all cores").at_least(0).at_most(1024), s.threads);
  v.value(layout("watchdog_seconds",
                 "how long a rank waits for another one before the run ends with exit code 72; 0: for ever")
              .at_least(0)
              .at_most(1e7),
          s.watchdog_seconds);
  v.value(layout("deterministic", "the same layout gives the same bits"), s.deterministic);
  v.value(
      output("resume", "auto: from the newest checkpoint of the run folder; never; or a checkpoint folder")
          .like({"auto", "never", "a checkpoint folder"}),
      s.resume);
  v.value(identity("branch_from", "checkpoint folder whose state starts a new run").or_empty("none"),
          s.branch_from);
  v.value(output("allow_fault_injection", "let tests kill the run at chosen places"),
          s.allow_fault_injection);
  v.value(
      output("prometheus",
             "file that holds the newest figures in Prometheus' text format, replaced whole at every step; "
             "node_exporter's textfile collector reads names that end in .prom")
          .or_empty("none"),
      s.prometheus);
}

void visit_model(FieldVisitor& v, ModelSpec& s) {
  v.value(
      identity(
          "from",
          "folder with config.json and *.safetensors (Hugging Face) whose weights the run starts from; its "
          "shape fills in the keys below")
          .or_empty("none"),
      s.from);
  v.value(identity("layers", "transformer blocks").at_least(1).at_most(kMostLayers).required(), s.layers);
  v.value(identity("hidden", "width of the residual stream").at_least(1).at_most(kMostWidth).required(),
          s.hidden);
  v.value(identity("heads", "query heads").at_least(1).at_most(kMostHeads).required(), s.heads);
  v.value(
      identity("kv_heads", "key and value heads; divides heads").at_least(1).at_most(kMostHeads).required(),
      s.kv_heads);
  v.value(identity("head_dim", "width of one head; even").at_least(2).at_most(kMostHeads).required(),
          s.head_dim);
  v.value(identity("mlp_hidden", "FFN width of dense layers")
              .at_least(1)
              .at_most(kMostWidth)
              .only_if(s.moe.experts == 0 || s.moe.dense_layers > 0,
                       "there are dense layers (moe.experts is 0, or moe.dense_layers at least 1)")
              .required(),
          s.mlp_hidden);
  v.value(identity("vocabulary", "rows of the embedding; 0: the tokenizer's").at_least(0).at_most(kMostWidth),
          s.vocabulary);
  v.value(identity("max_positions", "longest sequence, in tokens").at_least(1).at_most(kMostWidth),
          s.max_positions);
  v.value(identity("qk_norm", "RMSNorm on each query and key head"), s.qk_norm);
  v.value(identity("tied_head", "the head is the embedding, transposed"), s.tied_head);
  v.value(identity("norm_eps", "epsilon of every RMSNorm").at_least(1e-12).at_most(1), s.norm_eps);
  v.value(
      identity("swiglu_clamp", "bound on both branches of SwiGLU; 0: none").at_least(0).at_most(kMostFactor),
      s.swiglu_clamp);
  if (v.enter(identity("rope", "rotary position embedding"))) {
    visit_rope(v, s.rope);
    v.leave();
  }
  if (v.enter(identity("moe", "mixture of experts"))) {
    visit_moe(v, s.moe);
    v.leave();
  }
  if (v.enter(identity("init", "how the first weights are drawn")
                  .only_if(s.from.empty(), "weights are drawn, not taken from a folder (model.from)"))) {
    visit_init(v, s.init);
    v.leave();
  }
}

void visit_rule(FieldVisitor& v, RuleSpec& s, size_t table) {
  const bool nvfp4 = s.spec.format == Format::kNvfp4;
  const char* with_nvfp4 = "format is nvfp4";
  const bool rotated = s.spec.hadamard != 0;
  v.value(course("module", "globs; `*` crosses dots and matches modules with GEMMs alone")
              .like({"attn.qkv", "experts.*", "*"}),
          s.modules);
  v.value(course("layers", "which layers").like({"5", "0-3", "first 2", "last 15%"}).matching(kLayersPattern),
          s.layers);
  v.value(course("steps", "which steps of the stage, half open")
              .like({"0-90%", "100-500"})
              .matching(kStepsPattern),
          s.steps);
  v.value(course("gemm", "which GEMM")
              .one_of(is_forward_table(table) ? std::vector<std::string>{"fprop"}
                                              : std::vector<std::string>{"dgrad", "wgrad"}),
          s.gemm);
  v.value(course("operand", "which operand")
              .one_of(is_forward_table(table) ? std::vector<std::string>{"act", "weight"}
                                              : std::vector<std::string>{"act", "weight", "grad"}),
          s.operand);
  enum_value(v, course("format", "how the operand is represented").required(), s.spec.format, 4);
  enum_value(v, course("block", "elements that share one E4M3 scale").only_if(nvfp4, with_nvfp4),
             s.spec.block, 2);
  enum_value(v, course("scale_rule", "how a block's scale is chosen").only_if(nvfp4, with_nvfp4),
             s.spec.scale_rule, 2);
  enum_value(v,
             course("scale_scope", "domain of the FP32 scale; in the RL forward tables row for activations")
                 .only_if(nvfp4, with_nvfp4),
             s.spec.scale_scope, 2);
  enum_value(
      v,
      course("scale_round", "pow2: the FP32 scale rounded up to a power of two").only_if(nvfp4, with_nvfp4),
      s.spec.scale_round, 2);
  enum_value(
      v,
      course("rounding", "of elements (nearest, stochastic) or scales (ms_eden)").only_if(nvfp4, with_nvfp4),
      s.spec.rounding, 3);
  enum_value(
      v, course("headroom", "17/16: stochastic rounding without clipping bias").only_if(nvfp4, with_nvfp4),
      s.spec.headroom, 2);
  {
    const int32_t sizes[] = {0, 16, 32, 64, 128};
    Field field = course("hadamard", "size of the rotation along the contraction").only_if(nvfp4, with_nvfp4);
    field.one_of({"none", "16", "32", "64", "128"});
    size_t index = 0;
    while (index < 4 && sizes[index] != s.spec.hadamard) ++index;
    v.choice(field, index);
    s.spec.hadamard = sizes[index];
  }
  enum_value(v,
             course("signs", "of the rotation: the same all run long, or new in every micro-batch")
                 .only_if(nvfp4, with_nvfp4)
                 .only_if(rotated, "hadamard is given"),
             s.spec.signs, 2);
  enum_value(v,
             course("hadamard_out", "precision of the rotated value before quantising")
                 .only_if(nvfp4, with_nvfp4)
                 .only_if(rotated, "hadamard is given"),
             s.spec.hadamard_out, 2);
  enum_value(v,
             course("source", "backward: requantise the tensor, or reuse what the forward multiplied")
                 .only_if(s.spec.format != Format::kFp32, "format is bf16, mxfp8 or nvfp4")
                 .only_if(!is_forward_table(table), "the table is a backward table")
                 .only_if(s.operand != "grad", "the operand is act or weight"),
             s.spec.source, 2);
  v.value(course("from_preset", "written by print-config: the rule came with a preset and may lose"),
          s.from_preset);
}

Field preset_field() {
  return course("preset", "a named set of tables")
      .one_of({"fp32", "bf16", "mxfp8", "nvidia_nvfp4", "quartet2", "rl_nvfp4"});
}
Field override_field() { return course("override", "rules in front of the preset's, by table"); }
Field expanded_from_field() {
  Field field = preset_field();
  field.key = "expanded_from";
  field.help = "written by print-config: the preset that the tables below were spelled out from";
  return field;
}
Field table_field(size_t table) {
  static const char* const kHelp[kNumRecipeTables] = {
      "forward of pretraining and evaluation", "backward of pretraining", "whatever generates text",
      "forward of the RL trainer", "backward of the RL trainer"};
  return course(kTableNames[table], kHelp[table]);
}

namespace {

void visit_tokenizer(FieldVisitor& v, TokenizerSpec& s) {
  const bool ids = s.kind == "ids", file = s.kind == "json" || s.kind == "sentencepiece";
  constexpr const char* kWithFile = "kind is json or sentencepiece";
  v.value(identity("kind",
                   "bytes: 256 byte values and <eod>; ids: texts are numbers of tokens made elsewhere; json: "
                   "byte-level BPE of a tokenizer.json; sentencepiece: a .model")
              .one_of({"bytes", "ids", "json", "sentencepiece"}),
          s.kind);
  // The hash says which tokenizer it is; where its file lies may change.
  v.value(output("path", "the file: a tokenizer.json or a .model").only_if(file, kWithFile).required(),
          s.path);
  Field vocabulary =
      identity("vocabulary", "ids: number of tokens, the last of which is <eod>; else as the file has")
          .at_least(ids ? 2 : 0)
          .at_most(kMostWidth)
          .only_if(ids || file, "kind is ids, json or sentencepiece");
  vocabulary.is_required = ids;
  v.value(vocabulary, s.vocabulary);
  v.value(identity("end_of_document", "text of the token behind each document")
              .or_empty("the usual name that the file has")
              .only_if(file, kWithFile),
          s.end_of_document);
  v.value(identity("begin_of_document", "text of the token before each document and prompt, or none")
              .or_empty("what the file puts in front")
              .only_if(file, kWithFile),
          s.begin_of_document);
  v.value(identity("hash", "XXH3 of what decides ids in the file, in hex; checked at start")
              .or_empty("it is not checked")
              .only_if(file, kWithFile),
          s.hash);
  v.value(course("chat",
                 "form of conversations, in which prompts of tasks are a user's message: chatml, llama3, "
                 "mistral, or auto, as the tokenizer_config.json beside the file says")
              .or_empty("prompts are plain text")
              .like({"chatml", "llama3", "mistral", "auto"})
              .only_if(file, kWithFile),
          s.chat);
}

}  // namespace

void visit_recipe(FieldVisitor& v, Recipe& r) {
  if (v.enter(output("run", "name, place and seed of the run"))) {
    visit_run(v, r.run);
    v.leave();
  }
  if (v.enter(identity("model", "shape of the model").required())) {
    visit_model(v, r.model);
    v.leave();
  }
  if (v.enter(identity("tokenizer", "text to tokens"))) {
    visit_tokenizer(v, r.tokenizer);
    v.leave();
  }
  if (v.enter(layout("parallel", "how the work is spread"))) {
    v.value(layout("data", "ranks over which everything is replicated; 0: the number of ranks by expert")
                .at_least(0)
                .at_most(kMostHeads),
            r.parallel.data);
    v.value(layout("expert", "ranks that share the experts").at_least(1).at_most(kMostHeads),
            r.parallel.expert);
    v.value(
        layout("receive_factor",
               "rows that the experts of one of these ranks take in a round, by their even share: 0.05 or "
               "more; 0: all that could come, in one round. Further rounds add weights' gradients in "
               "another order, and round by themselves what has a scale for all rows of an expert or blocks "
               "along them. Without effect where expert is 1")
            .at_least(0)
            .at_most(kMostFactor),
        r.parallel.receive_factor);
    v.value(layout("expert_chunks",
                   "parts of a rank's experts, one of which computes while tokens of the next are on their "
                   "way; 0: as many as leave 16 MiB to each, at most 8; at most a rank's experts; without "
                   "effect where expert is 1; more than 1 did not pay on two H200")
                .at_least(0)
                .at_most(kMostHeads),
            r.parallel.expert_chunks);
    v.value(
        layout("domain",
               "consecutive ranks that a fast link connects: gradients are summed among them before they "
               "go beyond, weights come to one of them and go round; 0, or more than there are: all ranks; "
               "else a divisor of their number")
            .at_least(0)
            .at_most(kMostHeads),
        r.parallel.domain);
    v.value(
        layout("zero",
               "what ranks share besides masters and moments: 2: gradients of blocks, 3: weights of blocks, "
               "too; without effect on one rank")
            .at_least(1)
            .at_most(3),
        r.parallel.zero);
    v.value(
        layout("transport",
               "what carries tensors between ranks: nccl: one GPU a rank; host: host memory and MPI, slow "
               "on GPUs, of which several ranks may share one; auto: nccl on GPUs")
            .one_of({"auto", "nccl", "host"}),
        r.parallel.transport);
    v.value(
        layout("recompute", "what the backward computes again instead of keeping").one_of({"none", "block"}),
        r.parallel.recompute);
    v.leave();
  }
  if (v.enter(course("dtypes", "element types of the training state"))) {
    dtype_value(v, identity("masters", "master weights"), r.dtypes.masters);
    dtype_value(v, identity("moments", "optimizer moments"), r.dtypes.moments);
    dtype_value(v, course("gradients", "gradients; head, embedding and router are always fp32"),
                r.dtypes.gradients);
    v.leave();
  }
  v.precision(course("precision", "ordered rules a table, the first match wins"), r.precision);

  const size_t size =
      v.enter_list(course("stages", "what the run does, in order").required(), r.stages.size());
  r.stages.resize(size);
  const std::vector<Field> kinds = {course("pretrain", "learning from text"),
                                    course("rl", "learning from rewards")};
  for (size_t i = 0; i < size; ++i) {
    size_t kind = r.stages[i].index();
    if (!v.enter_kind(i, kinds, kind)) continue;
    if (kind != r.stages[i].index())
      r.stages[i] = kind == 0 ? StageSpec(PretrainSpec()) : StageSpec(RlSpec());
    if (kind == 0) {
      visit_pretrain(v, std::get<PretrainSpec>(r.stages[i]));
    } else {
      visit_rl(v, std::get<RlSpec>(r.stages[i]));
    }
    v.leave();
  }
  v.leave();
}

}  // namespace fp4t
