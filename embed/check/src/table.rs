//! The functions that are judged, and what each means. A row is the CUDA version in whose headers
//! the name first means this function, when it is judged ([`When`]), in brackets the name of its
//! form for per-thread default streams, its own name and arguments, and the judge's method with what
//! it is given. Stream 0 is the form's default stream.

use std::ffi::c_void;

use aquifer_device::{RawGraph, RawPhysical, RawStream};
use aquifer_oracle::Call;

use crate::call::{Form, NOT_FOUND, Next, Out, When, call};
use crate::judge::Moment::{Late, Now};
use crate::judge::{any, device, host};

/// A function that is judged.
#[derive(Debug)]
pub(crate) struct Function {
    /// The symbol, suffixes included.
    pub(crate) name: &'static str,
    /// The first CUDA version in whose headers the name means this function.
    pub(crate) since: i32,
    pub(crate) form: Form,
    pub(crate) address: *const (),
}

macro_rules! calls {
    ($($since:literal $when:ident $([$per_thread:ident])? $name:ident $args:tt => $method:ident $given:tt;)*) => {
        $(
            calls!(@export $when $name, Form::Legacy, $args, $method $given);
            $(calls!(@export $when $per_thread, Form::PerThread, $args, $method $given);)?
        )*

        pub(crate) fn functions() -> impl Iterator<Item = Function> {
            [$(
                Function { name: stringify!($name), since: $since, form: Form::Legacy, address: $name as *const () },
                $(Function {
                    name: stringify!($per_thread),
                    since: if $since < 7000 { 7000 } else { $since },
                    form: Form::PerThread,
                    address: $per_thread as *const (),
                },)?
            )*]
            .into_iter()
        }
    };
    (@export $when:ident $name:ident, $form:expr, ($($arg:ident: $type:ty),*), $method:ident ($($given:expr),*)) => {
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
            let pass = || {
                let Some(address) = NEXT.address() else { return NOT_FOUND };
                // SAFETY: the driver's function of this name has this signature.
                let function: unsafe extern "C" fn($($type),*) -> u32 = unsafe { std::mem::transmute(address) };
                // SAFETY: passed on to the program.
                unsafe { function($($arg),*) }
            };
            call((When::$when, stringify!($name), $form), pass, |judge, scene| judge.$method(scene, $($given),*))
        }
    };
}

calls! {
    // Memory.
    3020 Then cuMemAlloc_v2(ptr: Out<'_>, bytes: usize) => alloc(ptr, bytes);
    3020 Then cuMemAllocPitch_v2(ptr: Out<'_>, pitch: Out<'_>, width: usize, height: usize, element: u32)
        => alloc_pitch(ptr, pitch, height);
    6000 Then cuMemAllocManaged(ptr: Out<'_>, bytes: usize, flags: u32) => alloc(ptr, bytes);
    3020 Ends cuMemFree_v2(ptr: u64) => free(ptr);
    11020 Then [cuMemAllocAsync_ptsz] cuMemAllocAsync(ptr: Out<'_>, bytes: usize, stream: u64)
        => alloc_async(ptr, bytes, stream);
    11020 Then [cuMemAllocFromPoolAsync_ptsz] cuMemAllocFromPoolAsync
        (ptr: Out<'_>, bytes: usize, pool: u64, stream: u64) => alloc_async(ptr, bytes, stream);
    11020 Ends [cuMemFreeAsync_ptsz] cuMemFreeAsync(ptr: u64, stream: u64) => free_async(ptr, stream);
    3020 Then cuMemAllocHost_v2(ptr: Out<'_>, bytes: usize) => host_alloc(ptr, bytes);
    2020 Then cuMemHostAlloc(ptr: Out<'_>, bytes: usize, flags: u32) => host_alloc(ptr, bytes);
    2000 Ends cuMemFreeHost(ptr: u64) => host_free(ptr);
    6050 Then cuMemHostRegister_v2(ptr: u64, bytes: usize, flags: u32) => register(ptr, bytes);
    4000 Then cuMemHostRegister(ptr: u64, bytes: usize, flags: u32) => register(ptr, bytes);
    4000 Ends cuMemHostUnregister(ptr: u64) => unregister(ptr);
    10020 Then cuMemCreate(physical: Out<'_>, bytes: usize, properties: *const c_void, flags: u64) => create(physical);
    10020 Ends cuMemRelease(physical: u64) => take(Call::ReleasePhysical { physical: RawPhysical(physical) });
    10020 Then cuMemMap(ptr: u64, bytes: usize, offset: usize, physical: u64, flags: u64)
        => map(ptr, bytes, RawPhysical(physical));
    10020 Ends cuMemUnmap(ptr: u64, bytes: usize) => unmap(ptr, bytes);

    // Copies.
    3020 Always [cuMemcpyHtoD_v2_ptds] cuMemcpyHtoD_v2(dst: u64, src: usize, bytes: usize)
        => copy(device(dst), host(src), bytes, 0, Now);
    3020 Always [cuMemcpyDtoH_v2_ptds] cuMemcpyDtoH_v2(dst: usize, src: u64, bytes: usize)
        => copy(host(dst), device(src), bytes, 0, Now);
    3020 Always [cuMemcpyDtoD_v2_ptds] cuMemcpyDtoD_v2(dst: u64, src: u64, bytes: usize)
        => copy(device(dst), device(src), bytes, 0, Now);
    4000 Always [cuMemcpy_ptds] cuMemcpy(dst: u64, src: u64, bytes: usize) => copy(any(dst), any(src), bytes, 0, Now);
    4000 Always [cuMemcpyPeer_ptds] cuMemcpyPeer(dst: u64, to: u64, src: u64, from: u64, bytes: usize)
        => copy(device(dst), device(src), bytes, 0, Now);
    3020 Always [cuMemcpyHtoDAsync_v2_ptsz] cuMemcpyHtoDAsync_v2(dst: u64, src: usize, bytes: usize, stream: u64)
        => copy(device(dst), host(src), bytes, stream, Late);
    3020 Always [cuMemcpyDtoHAsync_v2_ptsz] cuMemcpyDtoHAsync_v2(dst: usize, src: u64, bytes: usize, stream: u64)
        => copy(host(dst), device(src), bytes, stream, Late);
    3020 Always [cuMemcpyDtoDAsync_v2_ptsz] cuMemcpyDtoDAsync_v2(dst: u64, src: u64, bytes: usize, stream: u64)
        => copy(device(dst), device(src), bytes, stream, Late);
    4000 Always [cuMemcpyAsync_ptsz] cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: u64)
        => copy(any(dst), any(src), bytes, stream, Late);
    4000 Always [cuMemcpyPeerAsync_ptsz] cuMemcpyPeerAsync
        (dst: u64, to: u64, src: u64, from: u64, bytes: usize, stream: u64)
        => copy(device(dst), device(src), bytes, stream, Late);
    13020 Always [cuMemcpyWithAttributesAsync_ptsz] cuMemcpyWithAttributesAsync
        (dst: u64, src: u64, bytes: usize, attributes: *const c_void, stream: u64)
        => copy(any(dst), any(src), bytes, stream, Late);
    // Of copies in 2D and 3D the ranges are not known. The host waits for some, and so counts as knowing
    // that all are done.
    3020 Then [cuMemcpy2D_v2_ptds] cuMemcpy2D_v2(copy: *const c_void)
        => known_work(0);
    3020 Then [cuMemcpy2DUnaligned_v2_ptds] cuMemcpy2DUnaligned_v2(copy: *const c_void)
        => known_work(0);
    3020 Then [cuMemcpy2DAsync_v2_ptsz] cuMemcpy2DAsync_v2(copy: *const c_void, stream: u64)
        => known_work(stream);
    3020 Then [cuMemcpy3D_v2_ptds] cuMemcpy3D_v2(copy: *const c_void)
        => known_work(0);
    3020 Then [cuMemcpy3DAsync_v2_ptsz] cuMemcpy3DAsync_v2(copy: *const c_void, stream: u64)
        => known_work(stream);
    4000 Then [cuMemcpy3DPeer_ptds] cuMemcpy3DPeer(copy: *const c_void) => known_work(0);
    4000 Then [cuMemcpy3DPeerAsync_ptsz] cuMemcpy3DPeerAsync(copy: *const c_void, stream: u64) => known_work(stream);
    12080 Always [cuMemcpyBatchAsync_ptsz] cuMemcpyBatchAsync(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize, attributes: *const c_void,
        firsts: *const usize, attribute_count: usize, failed: *mut usize, stream: u64
    ) => copy_batch(dsts, srcs, sizes, count, stream);
    13000 Always [cuMemcpyBatchAsync_v2_ptsz] cuMemcpyBatchAsync_v2(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize, attributes: *const c_void,
        firsts: *const usize, attribute_count: usize, stream: u64
    ) => copy_batch(dsts, srcs, sizes, count, stream);

    // Fills.
    3020 Always [cuMemsetD8_v2_ptds] cuMemsetD8_v2(ptr: u64, value: u8, count: usize) => fill(ptr, count, 0, Now);
    3020 Always [cuMemsetD16_v2_ptds] cuMemsetD16_v2(ptr: u64, value: u16, count: usize)
        => fill(ptr, count.saturating_mul(2), 0, Now);
    3020 Always [cuMemsetD32_v2_ptds] cuMemsetD32_v2(ptr: u64, value: u32, count: usize)
        => fill(ptr, count.saturating_mul(4), 0, Now);
    3020 Then [cuMemsetD2D8_v2_ptds] cuMemsetD2D8_v2(ptr: u64, pitch: usize, value: u8, width: usize, height: usize)
        => work(0);
    3020 Then [cuMemsetD2D16_v2_ptds] cuMemsetD2D16_v2
        (ptr: u64, pitch: usize, value: u16, width: usize, height: usize) => work(0);
    3020 Then [cuMemsetD2D32_v2_ptds] cuMemsetD2D32_v2
        (ptr: u64, pitch: usize, value: u32, width: usize, height: usize) => work(0);
    3020 Always [cuMemsetD8Async_ptsz] cuMemsetD8Async(ptr: u64, value: u8, count: usize, stream: u64)
        => fill(ptr, count, stream, Late);
    3020 Always [cuMemsetD16Async_ptsz] cuMemsetD16Async(ptr: u64, value: u16, count: usize, stream: u64)
        => fill(ptr, count.saturating_mul(2), stream, Late);
    3020 Always [cuMemsetD32Async_ptsz] cuMemsetD32Async(ptr: u64, value: u32, count: usize, stream: u64)
        => fill(ptr, count.saturating_mul(4), stream, Late);
    3020 Then [cuMemsetD2D8Async_ptsz] cuMemsetD2D8Async
        (ptr: u64, pitch: usize, value: u8, width: usize, height: usize, stream: u64)
        => work(stream);
    3020 Then [cuMemsetD2D16Async_ptsz] cuMemsetD2D16Async
        (ptr: u64, pitch: usize, value: u16, width: usize, height: usize, stream: u64)
        => work(stream);
    3020 Then [cuMemsetD2D32Async_ptsz] cuMemsetD2D32Async
        (ptr: u64, pitch: usize, value: u32, width: usize, height: usize, stream: u64)
        => work(stream);

    // Work that changes no contents. A location is a structure of 8 bytes.
    8000 Then [cuMemPrefetchAsync_ptsz] cuMemPrefetchAsync(ptr: u64, bytes: usize, ordinal: i32, stream: u64)
        => work(stream);
    12020 Then [cuMemPrefetchAsync_v2_ptsz] cuMemPrefetchAsync_v2
        (ptr: u64, bytes: usize, location: u64, flags: u32, stream: u64) => work(stream);
    6000 Then [cuStreamAttachMemAsync_ptsz] cuStreamAttachMemAsync(stream: u64, ptr: u64, bytes: usize, flags: u32)
        => work(stream);
    11010 Then [cuGraphUpload_ptsz] cuGraphUpload(graph: u64, stream: u64) => work(stream);

    // Streams and events.
    2000 Then cuStreamCreate(stream: Out<'_>, flags: u32) => create_stream(stream, flags);
    5050 Then cuStreamCreateWithPriority(stream: Out<'_>, flags: u32, priority: i32) => create_stream(stream, flags);
    4000 Ends cuStreamDestroy_v2(stream: u64) => take(Call::DestroyStream { stream: RawStream(stream) });
    2000 Then [cuStreamSynchronize_ptsz] cuStreamSynchronize(stream: u64)
        => take(Call::StreamComplete { stream: RawStream(stream) });
    2000 Then [cuStreamQuery_ptsz] cuStreamQuery(stream: u64)
        => take(Call::StreamComplete { stream: RawStream(stream) });
    3020 Then [cuStreamWaitEvent_ptsz] cuStreamWaitEvent(stream: u64, event: u64, flags: u32)
        => wait(stream, event, flags);
    2000 Then [cuEventRecord_ptsz] cuEventRecord(event: u64, stream: u64) => record(event, stream, 0);
    11010 Then [cuEventRecordWithFlags_ptsz] cuEventRecordWithFlags(event: u64, stream: u64, flags: u32)
        => record(event, stream, flags);
    2000 Then cuEventSynchronize(event: u64) => event_done(event);
    2000 Then cuEventQuery(event: u64) => event_done(event);
    2000 Then cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) => events_done(start, end);
    12080 Then cuEventElapsedTime_v2(milliseconds: *mut f32, start: u64, end: u64) => events_done(start, end);
    4000 Ends cuEventDestroy_v2(event: u64) => destroy_event(event);
    2000 Then cuCtxSynchronize() => take(Call::DeviceComplete);
    13000 Then cuCtxSynchronize_v2(context: u64) => take(Call::DeviceComplete);
    12050 Then cuCtxRecordEvent(context: u64, event: u64) => record_context(event);
    12050 Then cuCtxWaitEvent(context: u64, event: u64) => take(Call::DeviceComplete);
    4000 Then cuCtxDestroy_v2(context: u64) => forget();
    7000 Then cuDevicePrimaryCtxReset_v2(ordinal: i32) => forget();

    // What the device waits for, or the host learns, by other ways than events: see `docs/checking.md`.
    11070 Then [cuStreamWaitValue32_v2_ptsz] cuStreamWaitValue32_v2(stream: u64, ptr: u64, value: u32, flags: u32)
        => take(Call::WaitPeer { stream: RawStream(stream) });
    11070 Then [cuStreamWaitValue64_v2_ptsz] cuStreamWaitValue64_v2(stream: u64, ptr: u64, value: u64, flags: u32)
        => take(Call::WaitPeer { stream: RawStream(stream) });
    10000 Then [cuWaitExternalSemaphoresAsync_ptsz] cuWaitExternalSemaphoresAsync
        (semaphores: *const c_void, parameters: *const c_void, count: u32, stream: u64)
        => take(Call::WaitPeer { stream: RawStream(stream) });
    11070 Then [cuStreamWriteValue32_v2_ptsz] cuStreamWriteValue32_v2(stream: u64, ptr: u64, value: u32, flags: u32)
        => known_work(stream);
    11070 Then [cuStreamWriteValue64_v2_ptsz] cuStreamWriteValue64_v2(stream: u64, ptr: u64, value: u64, flags: u32)
        => known_work(stream);
    11070 Then [cuStreamBatchMemOp_v2_ptsz] cuStreamBatchMemOp_v2
        (stream: u64, count: u32, operations: *const c_void, flags: u32)
        => take(Call::WaitPeer { stream: RawStream(stream) });
    10000 Then [cuSignalExternalSemaphoresAsync_ptsz] cuSignalExternalSemaphoresAsync
        (semaphores: *const c_void, parameters: *const c_void, count: u32, stream: u64)
        => known_work(stream);
    10000 Then [cuLaunchHostFunc_ptsz] cuLaunchHostFunc(stream: u64, function: *const c_void, data: *const c_void)
        => known_work(stream);
    13020 Then [cuLaunchHostFunc_v2_ptsz] cuLaunchHostFunc_v2
        (stream: u64, function: *const c_void, data: *const c_void, mode: u32)
        => known_work(stream);
    5000 Then [cuStreamAddCallback_ptsz] cuStreamAddCallback
        (stream: u64, function: *const c_void, data: *const c_void, flags: u32)
        => known_work(stream);

    // Captures and graphs.
    10000 Then [cuStreamBeginCapture_ptsz] cuStreamBeginCapture(stream: u64)
        => take(Call::BeginCapture { stream: RawStream(stream) });
    10010 Then [cuStreamBeginCapture_v2_ptsz] cuStreamBeginCapture_v2(stream: u64, mode: u32)
        => take(Call::BeginCapture { stream: RawStream(stream) });
    12030 Then [cuStreamBeginCaptureToGraph_ptsz] cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, dependencies: *const u64, edges: *const c_void, count: usize, mode: u32
    ) => take(Call::BeginCapture { stream: RawStream(stream) });
    11030 Then [cuStreamUpdateCaptureDependencies_ptsz] cuStreamUpdateCaptureDependencies
        (stream: u64, dependencies: *const u64, count: usize, flags: u32) => blur_capture();
    12030 Then [cuStreamUpdateCaptureDependencies_v2_ptsz] cuStreamUpdateCaptureDependencies_v2
        (stream: u64, dependencies: *const u64, edges: *const c_void, count: usize, flags: u32) => blur_capture();
    10000 Always [cuStreamEndCapture_ptsz] cuStreamEndCapture(stream: u64, graph: Out<'_>)
        => end_capture(stream, graph);
    10000 Then cuGraphInstantiate(made: Out<'_>, graph: u64, node: *mut u64, log: *mut c_void, bytes: usize)
        => copy_graph(RawGraph(graph), made);
    11000 Then cuGraphInstantiate_v2(made: Out<'_>, graph: u64, node: *mut u64, log: *mut c_void, bytes: usize)
        => copy_graph(RawGraph(graph), made);
    11040 Then cuGraphInstantiateWithFlags(made: Out<'_>, graph: u64, flags: u64) => copy_graph(RawGraph(graph), made);
    12000 Then [cuGraphInstantiateWithParams_ptsz] cuGraphInstantiateWithParams
        (made: Out<'_>, graph: u64, parameters: *mut c_void) => copy_graph(RawGraph(graph), made);
    10000 Then cuGraphClone(made: Out<'_>, graph: u64) => copy_graph(RawGraph(graph), made);
    10020 Then cuGraphExecUpdate(made: u64, graph: u64, node: *mut u64, result: *mut u32)
        => take(Call::CopyGraph { graph: RawGraph(graph), copy: RawGraph(made) });
    12000 Then cuGraphExecUpdate_v2(made: u64, graph: u64, info: *mut c_void)
        => take(Call::CopyGraph { graph: RawGraph(graph), copy: RawGraph(made) });
    10000 Then [cuGraphLaunch_ptsz] cuGraphLaunch(graph: u64, stream: u64) => launch_graph(RawGraph(graph), stream);
    10000 Ends cuGraphExecDestroy(graph: u64) => take(Call::DestroyGraph { graph: RawGraph(graph) });
    10000 Ends cuGraphDestroy(graph: u64) => take(Call::DestroyGraph { graph: RawGraph(graph) });
    10000 Then cuGraphExecMemcpyNodeSetParams(graph: u64, node: u64, parameters: *const c_void, context: u64)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });
    10000 Then cuGraphExecMemsetNodeSetParams(graph: u64, node: u64, parameters: *const c_void, context: u64)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });
    12000 Then cuGraphExecKernelNodeSetParams_v2(graph: u64, node: u64, parameters: *const c_void)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });
    12020 Then cuGraphExecNodeSetParams(graph: u64, node: u64, parameters: *mut c_void)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });
    10000 Then cuGraphExecChildGraphNodeSetParams(graph: u64, node: u64, child: u64)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });
    11060 Then cuGraphNodeSetEnabled(graph: u64, node: u64, enabled: u32)
        => take(Call::DestroyGraph { graph: RawGraph(graph) });

    // Kernels.
    4000 Then [cuLaunchKernel_ptsz] cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: u64, parameters: *const *const c_void, extra: *const c_void
    ) => kernel(function, parameters, stream);
    11060 Then [cuLaunchKernelEx_ptsz] cuLaunchKernelEx(
        config: Option<&Config>, function: u64, parameters: *const *const c_void, extra: *const c_void
    ) => kernel(function, parameters, config.map_or(0, |config| config.stream));
    9000 Then [cuLaunchCooperativeKernel_ptsz] cuLaunchCooperativeKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: u64, parameters: *const *const c_void
    ) => kernel(function, parameters, stream);
    2000 Ends cuModuleUnload(module: u64) => forget_kernels();
    12000 Ends cuLibraryUnload(library: u64) => forget_kernels();
}

/// `CUlaunchConfig`.
#[derive(Debug)]
#[repr(C)]
struct Config {
    shape: [u32; 7],
    stream: u64,
    attributes: *const c_void,
    attribute_count: u32,
}
