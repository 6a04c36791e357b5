#include "engine/stage/devices.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/comm/agree.h"
#include "engine/comm/device.h"
#include "kernels/base/text.h"

namespace fp4t {

namespace {

using nlohmann::json;

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "?";
}

RankDevices devices_here() {
  RankDevices d{host_name(), {}};
  for (int i = 0; i < cuda::device_count(); ++i) d.gpus.push_back(cuda::device_id(i));
  return d;
}

std::vector<RankDevices> devices_of_all(Communicator& comm) {
  const RankDevices mine = devices_here();
  std::vector<RankDevices> all;
  for (const std::string& text : gather_texts(comm, json{mine.host, mine.gpus}.dump())) {
    const json j = json::parse(text);
    all.push_back({j[0].get<std::string>(), j[1].get<std::vector<std::string>>()});
  }
  return all;
}

int64_t ranks_on(const std::vector<RankDevices>& ranks, const std::string& host) {
  return std::count_if(ranks.begin(), ranks.end(), [&](const RankDevices& r) { return r.host == host; });
}

size_t gpus_on(const std::vector<RankDevices>& ranks, const std::string& host) {
  std::set<std::string> gpus;
  for (const RankDevices& r : ranks) {
    if (r.host == host) gpus.insert(r.gpus.begin(), r.gpus.end());
  }
  return gpus.size();
}

std::vector<RankPlace> places_of_all(Communicator& comm, const Machine& machine) {
  const auto gib = [](int64_t bytes) { return (bytes + (int64_t{1} << 29)) >> 30; };
  const std::string mine = detail::concat(machine.device_name, ", ", gib(machine.memory_bytes), " GiB, ",
                                          machine.num_threads, " threads");
  std::vector<RankPlace> all;
  for (const std::string& text : gather_texts(comm, json{host_name(), mine}.dump())) {
    const json j = json::parse(text);
    all.push_back({j[0].get<std::string>(), j[1].get<std::string>()});
  }
  return all;
}

}  // namespace

std::string unevenness(const std::vector<RankPlace>& ranks) {
  std::map<std::string, int64_t> on_host;
  for (const RankPlace& r : ranks) ++on_host[r.host];
  std::map<std::string, std::vector<size_t>> kinds;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const int64_t n = on_host[ranks[r].host];
    kinds[detail::concat(ranks[r].machine, ", ", n, n == 1 ? " rank" : " ranks", " on the host")].push_back(
        r);
  }
  if (kinds.size() < 2) return "";
  std::string text = "ranks are uneven, and the slowest sets the pace:";
  for (const auto& [kind, list] : kinds) {
    text += detail::concat("\n  ", kind, ": ", list.size(), " of them, the first is rank ", list.front(),
                           " on '", printable(ranks[list.front()].host), "'");
  }
  return text;
}

std::vector<int> choose_gpus(const std::vector<RankDevices>& ranks, bool shared) {
  std::set<std::string> taken;
  std::map<std::string, int> turns;
  std::vector<int> chosen;
  for (const RankDevices& r : ranks) {
    const auto count = static_cast<int>(r.gpus.size());
    if (shared && count > 0) {
      chosen.push_back(turns[r.host]++ % count);
      continue;
    }
    const auto free = std::find_if(r.gpus.begin(), r.gpus.end(),
                                   [&](const std::string& gpu) { return taken.count(gpu) == 0; });
    if (free == r.gpus.end()) {
      throw RecipeError(detail::concat(
          "host '", printable(r.host), "' has ", ranks_on(ranks, r.host), " ranks and ",
          gpus_on(ranks, r.host),
          " GPUs: start at most one rank a GPU, or let ranks share them by parallel.transport: host (slow)"));
    }
    taken.insert(*free);
    chosen.push_back(static_cast<int>(free - r.gpus.begin()));
  }
  return chosen;
}

Machine machine_of_rank(const Recipe& recipe, Communicator& comm, std::vector<std::string>& notes) {
  const int threads = threads_of_rank(recipe.run.threads, comm);
  if (comm.size() == 1) return probe_machine(recipe.run.device, threads);
  int index = 0;
  int64_t sharing = 1;
  if (recipe.run.device != "cpu") {
    const std::vector<RankDevices> all = devices_of_all(comm);
    const bool any =
        std::any_of(all.begin(), all.end(), [](const RankDevices& r) { return !r.gpus.empty(); });
    if (any) {
      const auto me = static_cast<size_t>(comm.rank());
      const bool shared = recipe.parallel.transport == "host" || nccl_shares_gpus();
      const std::vector<int> chosen = choose_gpus(all, shared);
      index = chosen[me];
      const auto id = [&](size_t r) { return all[r].gpus[static_cast<size_t>(chosen[r])]; };
      sharing = 0;
      for (size_t r = 0; r < all.size(); ++r) sharing += id(r) == id(me) ? 1 : 0;
    }
  }
  Machine machine = probe_machine(recipe.run.device, threads, index);
  machine.memory_bytes /= sharing;
  machine.free_bytes /= sharing;
  if (sharing > 1) {
    notes.push_back(detail::concat(
        sharing, " ranks share a GPU (parallel.transport: ", recipe.parallel.transport, "): this is slow"));
  } else if (machine.backend == Backend::kCuda && recipe.parallel.transport == "host") {
    notes.push_back("tensors travel through host memory (parallel.transport: host): this is slow");
  }
  const char* const backend = machine.backend == Backend::kCuda ? "a GPU" : "the CPU";
  const std::string other = first_difference(comm, {{backend, ""}});
  if (!other.empty()) {
    const std::string why = machine.gpu_obstacle.empty() ? "" : ": " + machine.gpu_obstacle;
    throw RecipeError(detail::concat("this rank computes on ", backend, why, "; another one does not (",
                                     other, "): say run.device"));
  }
  const std::string uneven = unevenness(places_of_all(comm, machine));
  if (!uneven.empty()) notes.push_back(uneven);
  return machine;
}

}  // namespace fp4t
