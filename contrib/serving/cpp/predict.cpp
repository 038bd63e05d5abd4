// Predicts by a package of shardwright.export_for_inference: a batch a line of JSON in, its outputs a line of JSON out.
//
//   shardwright_predict PACKAGE [pt2|torchscript] < batches.jsonl
//
// A batch: {"features": {"f": [[1, 2], []]}, "weights": {"f": [[0.5, 1.0], []]}, "dense": [[0.1], [0.2]]}: a bag of ids
// a sample. A feature that is left out has empty bags. All operators are torch's own.
//
// Legend: F features, B samples, N ids of all features.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

using nlohmann::json;
using Tensors = std::vector<torch::Tensor>;
using Model = std::function<Tensors(Tensors)>;

Model load(const std::filesystem::path& package, const json& manifest, const std::string& form) {
  const auto file = (package / manifest.at("model").at(form).get<std::string>()).string();
  if (form == "pt2") {
    auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file);
    return [loader](Tensors inputs) { return loader->run(inputs); };
  }
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(file));
  module->eval();
  return [module](Tensors inputs) {
    const auto outputs = module->forward({inputs.begin(), inputs.end()}).toTuple();
    Tensors tensors;
    for (const auto& output : outputs->elements()) tensors.push_back(output.toTensor());
    return tensors;
  };
}

// The rows of all tables, read from the disk where they are first used.
torch::Tensor map_rows(const std::filesystem::path& file, const json& manifest) {
  const auto size = static_cast<int64_t>(std::filesystem::file_size(file));
  const json written = manifest.value("rows_bytes", json());  // null in packages that do not say
  if (!written.is_null() && written != size)
    throw std::invalid_argument(file.string() + " has " + std::to_string(size) + " bytes, and its package was written with " +
                                written.dump() + ": copy the package anew");
  return torch::from_file(file.string(), /*shared=*/false, size, torch::kUInt8);
}

template <typename T>
torch::Tensor tensor_of(const std::vector<T>& values) {
  return torch::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                          torch::CppTypeToScalarType<T>::value).clone();
}

// values [N], lengths [F * B], weights [N] if ids carry any, and dense [B, columns] if the model takes one.
Tensors inputs_of(const json& manifest, const json& batch) {
  const json bags = batch.value("features", json::object()), weights = batch.value("weights", json::object());
  const json dense = batch.value("dense", json::array());
  const auto samples = bags.empty() ? dense.size() : bags.begin()->size();
  if (samples == 0) throw std::invalid_argument("a batch has one sample at least");
  for (const auto& item : bags.items())
    if (item.value().size() != samples) throw std::invalid_argument(item.key() + " has another number of samples");
  std::set<std::string> unknown;
  for (const auto& given : {bags, weights})
    for (const auto& item : given.items()) unknown.insert(item.key());
  std::vector<int64_t> ids, lengths;
  std::vector<float> weight_of_id;
  bool is_weighted = false;
  for (const auto& feature : manifest.at("features")) {
    const std::string name = feature.at("name");
    const bool own_weighted = feature.at("is_weighted");
    const int64_t rows = feature.at("num_embeddings").is_null() ? INT64_MAX : feature.at("num_embeddings").get<int64_t>();
    unknown.erase(name);
    is_weighted |= own_weighted;
    const json own = bags.value(name, json(samples, json::array()));
    const json own_weights = own_weighted ? weights.value(name, json(samples, json::array())) : json();
    if (own_weighted && own_weights.size() != samples)
      throw std::invalid_argument(name + " has weights of another number of samples");
    for (size_t sample = 0; sample < samples; ++sample) {
      const json& bag = own.at(sample);
      lengths.push_back(static_cast<int64_t>(bag.size()));
      for (const json& given : bag) {
        if (!given.is_number_integer()) throw std::invalid_argument(name + ": id " + given.dump() + " is no whole number");
        const auto id = given.get<int64_t>();
        if (id < 0 || id >= rows) throw std::invalid_argument(name + ": id " + std::to_string(id) + " is no row");
        ids.push_back(id);
      }
      if (!own_weighted) continue;
      if (own_weights.at(sample).size() != bag.size()) throw std::invalid_argument(name + ": each id needs a weight");
      for (float weight : own_weights.at(sample)) weight_of_id.push_back(weight);
    }
  }
  if (!unknown.empty()) throw std::invalid_argument("unknown feature " + *unknown.begin());
  Tensors inputs{tensor_of(ids), tensor_of(lengths)};
  if (is_weighted) inputs.push_back(tensor_of(weight_of_id));
  if (!manifest.at("dense").is_null()) {
    std::vector<float> numbers;
    const int64_t columns = manifest.at("dense").at("columns");
    if (dense.size() != samples) throw std::invalid_argument("dense has another number of samples");
    for (const auto& row : dense) {
      if (static_cast<int64_t>(row.size()) != columns) throw std::invalid_argument("dense has another number of columns");
      for (float number : row) numbers.push_back(number);
    }
    inputs.push_back(tensor_of(numbers).view({static_cast<int64_t>(samples), columns}));
  }
  return inputs;
}

json nested(const torch::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.item<double>();
  json rows = json::array();
  for (const auto& row : tensor.unbind()) rows.push_back(nested(row));
  return rows;
}

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("usage: shardwright_predict PACKAGE [pt2|torchscript] < batches.jsonl");
  const std::filesystem::path package = argv[1];
  const json manifest = json::parse(std::ifstream(package / "package.json"));
  if (manifest.at("format") != 1) throw std::invalid_argument("the package's format is not 1, which this program reads");
  const torch::InferenceMode inference;
  const auto model = load(package, manifest, argc > 2 ? argv[2] : "pt2");
  const auto rows = map_rows(package / manifest.at("model").at("tables").get<std::string>(), manifest);
  for (std::string line; std::getline(std::cin, line);) {
    auto inputs = inputs_of(manifest, json::parse(line));
    inputs.push_back(rows);
    const auto outputs = model(inputs);
    json answer = json::object();
    for (size_t i = 0; i < outputs.size(); ++i) answer[manifest["outputs"][i].at("name")] = nested(outputs[i]);
    std::cout << answer << std::endl;
  }
} catch (const std::exception& error) {
  std::cerr << "shardwright_predict: " << error.what() << std::endl;
  return 1;
}
