// Keeping a stream busy.
#include "common.cuh"

// Until so many nanoseconds have passed, give or take one tick of the device's clock, 32 ns to 1 us on most: the start that is read
// may be as old as that.
KERNEL spin(u64 ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
