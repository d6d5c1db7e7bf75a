// ns for a pair: an allocation by whichever allocator PyTorch has, and its free. Build as compare.py does.
#include <ctime>
#include <random>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace cache = c10::cuda::CUDACachingAllocator;

template <typename Body> static double time_of(int count, Body body) {
    body();
    const std::clock_t begin = std::clock(); // of the processor, because other load does not count there
    body();
    return 1e9 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / count;
}

// One size again and again.
extern "C" double hot(size_t bytes, int count) {
    return time_of(count, [&] {
        for (int i = 0; i < count; i++) {
            cache::raw_delete(cache::raw_alloc(bytes));
        }
    });
}

// A random one of so many live blocks is replaced by one of another size, up to 1 MiB.
extern "C" double churn(size_t blocks, int count) {
    std::mt19937 random(1);
    std::vector<void *> live(blocks);
    const auto replace = [&](void *&block) {
        if (block) {
            cache::raw_delete(block);
        }
        block = cache::raw_alloc(1 + random() % (1 << 20));
    };
    for (void *&block : live) {
        replace(block);
    }
    const double ns = time_of(count, [&] {
        for (int i = 0; i < count; i++) {
            replace(live[random() % blocks]);
        }
    });
    for (void *block : live) {
        cache::raw_delete(block);
    }
    return ns;
}
