// config.json and generation_config.json of an exported model.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "engine/store/export_model.h"
#include "engine/store/safetensors.h"

namespace fp4t {

// Numbers of special tokens: the source's config.json where there is one, else these (-1: none). A reader
// takes its family's numbers for what is not written, so that there is none is written, too.
nlohmann::ordered_json special_tokens(const std::string& source, int64_t begin_token, int64_t end_token);
// Both spellings of the rotary embedding and of the type are written: `rope_parameters` and `dtype` as
// transformers 5 has them, `rope_theta`, `rope_scaling` and `torch_dtype` as earlier readers do.
nlohmann::ordered_json config_json(const ModelSpec& model, Family family, FileType number,
                                   const nlohmann::ordered_json& special_tokens);

}  // namespace fp4t
