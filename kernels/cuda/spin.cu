// Keeping a stream busy.
#include "common.cuh"

// Until so many nanoseconds have passed. The clock's resolution is the device's: 32 ns to 1 us on most.
KERNEL spin(u64 ns) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < ns);
}
