/* In place of cuBLAS and cuRAND, which candle opens with its device: handles that stand for nothing. */
#include <stddef.h>
static int handle;
int cublasCreate_v2(void **out) { *out = &handle; return 0; }
int cublasDestroy_v2(void *h) { (void)h; return 0; }
int cublasSetStream_v2(void *h, void *s) { (void)h, (void)s; return 0; }
int curandCreateGenerator(void **out, int kind) { (void)kind; *out = &handle; return 0; }
int curandDestroyGenerator(void *g) { (void)g; return 0; }
int curandSetStream(void *g, void *s) { (void)g, (void)s; return 0; }
int curandSetPseudoRandomGeneratorSeed(void *g, unsigned long long seed) { (void)g, (void)seed; return 0; }
