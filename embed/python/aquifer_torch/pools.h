// Pools by PyTorch's ids, those of `torch.cuda.MemPool` and of graphs: which of them a request comes from, and how long each is kept.
//
// PyTorch says which requests belong to a pool by a filter of their streams, and which of them are captured only where it is asked. A pool of
// Aquifer's is created when memory is first asked of it, because PyTorch tells its options after it has made one. It is released with its
// last use: that of a graph ends when the graph is reset or destroyed, so its memory is given to no other request before.

#pragma once

#include "library.h"

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

struct CUstream_st;

namespace {

class Pools {
  public:
    using Filter = std::function<bool(CUstream_st *)>;

    // Memory for work of a stream, from the pool that its requests come from, or from none. Null after an error.
    void *take(size_t size, int device, CUstream_st *stream) {
        const uint64_t pool = routed_.load(std::memory_order_relaxed) ? pool_of(device, stream) : 0;
        return pool == 0 ? api.malloc(size, device, stream) : api.pool_malloc(pool, size, stream);
    }

    void add_use(int device, c10::MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, id}].uses += 1;
    }

    int uses(int device, c10::MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pools_.find({device, id});
        return found == pools_.end() ? 0 : found->second.uses;
    }

    void set_option(int device, c10::MempoolId_t id, int option, bool on) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Pool &pool = pools_[{device, id}];
        // PyTorch turns options off as it destroys a pool, when there must be no exception.
        TORCH_CHECK(pool.pool == 0 || !on, "Aquifer: the options of a pool must be set before memory is asked of it");
        pool.options = on ? pool.options | option : pool.options & ~option;
    }

    // Sends requests for streams that pass the filter to the pool, which gets a use.
    void begin(int device, c10::MempoolId_t id, Filter filter) {
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, id}].uses += 1;
        routes_.push_back({device, id, std::move(filter)});
        routed_.store(true);
    }

    // Ends the last such route. The use stays.
    void end(int device, c10::MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
            if (route->device == device && route->id == id) {
                routes_.erase(std::next(route).base());
                break;
            }
        }
        routed_.store(!routes_.empty());
        const auto found = pools_.find({device, id});
        if (found != pools_.end() && found->second.pool != 0) {
            check(api.pool_end_captures(found->second.pool));
        }
    }

    // Ends a use.
    void release(int device, c10::MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = pools_.find({device, id});
        if (found == pools_.end() || --found->second.uses > 0) {
            return;
        }
        const uint64_t pool = found->second.pool;
        pools_.erase(found);
        if (pool != 0) {
            check(api.pool_release(pool));
        }
    }

  private:
    struct Pool {
        int uses = 0;
        int options = 0;
        uint64_t pool = 0;
    };

    struct Route {
        int device;
        c10::MempoolId_t id;
        Filter filter;
    };

    // The pool that requests for the stream come from; 0 if there is none.
    uint64_t pool_of(int device, CUstream_st *stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto route = routes_.rbegin(); route != routes_.rend(); ++route) {
            if (route->device == device && route->filter(stream)) {
                Pool &pool = pools_[{device, route->id}];
                if (pool.pool == 0) {
                    pool.pool = api.pool_create(device, pool.options);
                }
                if (pool.pool == 0) {
                    fail();
                }
                return pool.pool;
            }
        }
        return 0;
    }

    std::mutex mutex_;
    std::map<std::pair<int, c10::MempoolId_t>, Pool> pools_;
    std::vector<Route> routes_;
    std::atomic<bool> routed_{false};
};

} // namespace
