// Whose counters a call uses: host code beside the kernel.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fpx {

constexpr int kCounterSets = 1024, kCounters = 512;

// Numbers of the sets of counters that streams, and graphs as long as they live, have for themselves.
class CounterSets {
 public:
  // The set of a stream, or of a stream in the capture of that graph; -1 where all are taken.
  int of(cudaStream_t stream, unsigned long long capture, cudaGraph_t graph) {
    const uint64_t key = reinterpret_cast<uint64_t>(stream) * 0x9E3779B97F4A7C15u ^ capture * 0xC2B2AE3D27D4EB4Fu;
    int set;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto found = sets_.find(key); found != sets_.end()) return found->second;
      if (!free_.empty()) set = free_.back(), free_.pop_back();
      else if (used_ < kCounterSets) set = used_++;
      else return -1;
      sets_.emplace(key, set);
    }
    if (capture) {  // the graph, and what is instantiated from it, give the set back when they go
      auto* lease = new Lease{this, key};
      cudaUserObject_t object;
      if (cudaUserObjectCreate(&object, lease, &CounterSets::give_back, 1, cudaUserObjectNoDestructorSync))
        delete lease;  // the set stays taken
      else
        cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    }
    return set;
  }

  int free() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kCounterSets - used_ + int(free_.size());
  }

 private:
  struct Lease {
    CounterSets* sets;
    uint64_t key;
  };

  static void give_back(void* pointer) {  // on a thread of the driver's: it must not wait for CUDA, so the lock is its own
    auto* lease = static_cast<Lease*>(pointer);
    CounterSets& sets = *lease->sets;
    std::lock_guard<std::mutex> lock(sets.mutex_);
    const auto found = sets.sets_.find(lease->key);
    sets.free_.push_back(found->second);
    sets.sets_.erase(found);
    delete lease;
  }

  std::mutex mutex_;
  std::unordered_map<uint64_t, int> sets_;
  std::vector<int> free_;
  int used_ = 0;
};

}  // namespace fpx
