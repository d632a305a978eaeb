/* A CUDA runtime and driver with one device, an H100 that cannot compute.

   It is loaded before CUDA's own libraries. Questions about the device are answered; streams and
   events are numbers; memory is the host's. Whatever would compute fails: those functions are
   generated from CUDA's headers, and call no_gpu_refuses. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE cudaSuccess
static __thread cudaError_t last_error = cudaSuccess;
static char *next_handle = (char *)4096;

static void *new_handle(void) { return __sync_add_and_fetch(&next_handle, 16); }

cudaError_t no_gpu_refuses(const char *name) {
  fprintf(stderr, "no GPU: %s\n", name);
  if (!strncmp(name, "cuda", 4)) last_error = cudaErrorNotSupported; /* not so the driver's */
  return cudaErrorNotSupported;
}

/* the device */
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return NONE; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return NONE; }
cudaError_t cudaSetDevice(int device) { return NONE; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return NONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return NONE; }
cudaError_t cudaDeviceSynchronize(void) { return NONE; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return NONE; }
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return NONE; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "no GPU, with the limits of an H100");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->totalGlobalMem = (size_t)80 << 30;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = 1;
  return NONE;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
  *value = name == cudaDevAttrComputeCapabilityMajor       ? 9
           : name == cudaDevAttrMultiProcessorCount        ? 132
           : name == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
           : name == cudaDevAttrWarpSize                   ? 32
                                                           : 0;
  return NONE;
}

/* errors */
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t e) { return e ? "there is no GPU to do this" : ""; }
const char *cudaGetErrorName(cudaError_t e) { return e ? "noGpu" : "cudaSuccess"; }

/* streams */
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return NONE;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = new_handle(); return NONE; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
  return cudaStreamCreate(s);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  return cudaStreamCreate(s);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return NONE; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return NONE; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return NONE; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return NONE; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return NONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return NONE;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return NONE; }

/* events */
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = new_handle(); return NONE; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return NONE; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return NONE; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return NONE; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return NONE; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return NONE; }

/* memory */
static cudaError_t allocate(void **memory, size_t size) {
  *memory = aligned_alloc(4096, (size + 4095) & ~(size_t)4095);
  return *memory ? NONE : cudaErrorMemoryAllocation;
}
cudaError_t cudaMalloc(void **memory, size_t size) { return allocate(memory, size); }
cudaError_t cudaFree(void *memory) { free(memory); return NONE; }
cudaError_t cudaHostAlloc(void **m, size_t size, unsigned flags) { return allocate(m, size); }
cudaError_t cudaFreeHost(void *memory) { free(memory); return NONE; }
cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) { return NONE; }
cudaError_t cudaHostUnregister(void *memory) { return NONE; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = *total = (size_t)80 << 30;
  return NONE;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *memory) {
  memset(a, 0, sizeof *a);
  return NONE;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memcpy(to, from, size);
  return NONE;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
  return cudaMemcpy(to, from, size, kind);
}

/* the driver: what loads a compiled kernel */
#define DONE CUDA_SUCCESS
CUresult cuInit(unsigned flags) { return DONE; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return DONE; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return DONE; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return DONE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = new_handle();
  return DONE;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }
CUresult cuCtxSetCurrent(CUcontext context) { return DONE; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
  cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)name, device);
  return DONE;
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { *module = new_handle(); return DONE; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return cuModuleLoad(module, NULL);
}
CUresult cuModuleUnload(CUmodule module) { return DONE; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = new_handle();
  return DONE;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function) {
  *value = 0;
  return DONE;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute name, int value) { return DONE; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return DONE; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return NONE;
}
