//! Bugs of published programs, each rebuilt in a few calls of the driver: `bugs NAME` has the bug,
//! `bugs NAME fixed` has not. A number behind repeats it; `bugs NAME abort` aborts then. `bugs right`
//! does what right programs do. The tests run them under the checker.

use std::error::Error;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const BYTES: usize = 1 << 20;
const LEGACY: CUstream = null_mut();
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A name, and what it does; `true` for its mended form.
type Bug = (&'static str, fn(bool));
type Done = Result<(), Box<dyn Error>>;

fn ok(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

/// Makes a call of the driver that writes a value, and returns that.
macro_rules! get {
    ($name:ident($($arg:expr),*)) => {{
        let mut value = MaybeUninit::uninit();
        // SAFETY: the arguments are those of the driver's documentation.
        ok(unsafe { sys::$name(value.as_mut_ptr(), $($arg),*) });
        // SAFETY: the call succeeded.
        unsafe { value.assume_init() }
    }};
}

/// Makes a call of the driver, and returns its code.
macro_rules! call {
    ($name:ident($($arg:expr),*)) => {
        // SAFETY: the arguments are those of the driver's documentation, or the mistake that is shown.
        unsafe { sys::$name($($arg),*) }
    };
}

fn stream() -> CUstream {
    get!(cuStreamCreate(1))
}

fn event() -> CUevent {
    get!(cuEventCreate(2))
}

fn alloc(stream: CUstream) -> CUdeviceptr {
    get!(cuMemAllocAsync(BYTES, stream))
}

fn free(memory: CUdeviceptr, stream: CUstream) {
    ok(call!(cuMemFreeAsync(memory, stream)));
}

fn pinned() -> *mut c_void {
    get!(cuMemAllocHost_v2(BYTES))
}

/// Writes. A driver may refuse it where the memory was freed.
fn fill(memory: CUdeviceptr, stream: CUstream) {
    let _ = call!(cuMemsetD8Async(memory, 1, BYTES, stream));
}

fn copy(to: CUdeviceptr, from: CUdeviceptr, stream: CUstream) {
    ok(call!(cuMemcpyDtoDAsync_v2(to, from, BYTES, stream)));
}

/// Orders `later` after what `earlier` has got so far.
fn order(later: CUstream, earlier: CUstream) {
    let event = event();
    ok(call!(cuEventRecord(event, earlier)));
    ok(call!(cuStreamWaitEvent(later, event, 0)));
    ok(call!(cuEventDestroy_v2(event)));
}

fn synchronize(stream: CUstream) {
    ok(call!(cuStreamSynchronize(stream)));
}

/// A pool merges the free list of another stream into a stream's own: that waits for the event of
/// the other one, but records none for the third stream that takes the block next.
fn merged_free_list(fixed: bool) {
    let [one, two, three] = [(); 3].map(|()| stream());
    let pool = alloc(one);
    let recorded = event();
    fill(pool, one);
    ok(call!(cuEventRecord(recorded, one)));
    ok(call!(cuStreamWaitEvent(two, recorded, 0)));
    fill(pool, two);
    if fixed {
        ok(call!(cuEventRecord(recorded, two)));
    }
    ok(call!(cuStreamWaitEvent(three, recorded, 0)));
    fill(pool, three);
}

/// The remainder of a region is split off for a stream, and counts as that stream's, although
/// another one's work on it is not done.
fn leftovers_of_a_region(fixed: bool) {
    let [worker, caller] = [(); 2].map(|()| stream());
    let region: CUdeviceptr = get!(cuMemAlloc_v2(4 * BYTES));
    fill(region + 2 * BYTES as CUdeviceptr, worker);
    if fixed {
        order(caller, worker);
    }
    fill(region, caller);
    fill(region + 2 * BYTES as CUdeviceptr, caller);
}

/// Captures a fill of memory.
fn captured(memory: CUdeviceptr, stream: CUstream) -> CUgraphExec {
    ok(call!(cuStreamBeginCapture_v2(stream, RELAXED)));
    fill(memory, stream);
    ended(stream)
}

fn ended(stream: CUstream) -> CUgraphExec {
    let mut graph: CUgraph = null_mut();
    ok(call!(cuStreamEndCapture(stream, &raw mut graph)));
    let launchable = get!(cuGraphInstantiateWithFlags(graph, 0));
    ok(call!(cuGraphDestroy(graph)));
    launchable
}

/// A graph is launched after memory that it writes was freed.
fn stale_graph(fixed: bool) {
    let stream = stream();
    let memory: CUdeviceptr = get!(cuMemAlloc_v2(BYTES));
    let graph = captured(memory, stream);
    if !fixed {
        ok(call!(cuMemFree_v2(memory)));
    }
    let _ = call!(cuGraphLaunch(graph, stream));
}

/// Memory is zeroed on the default stream and read on one that does not wait for it.
fn zeroed_elsewhere(fixed: bool) {
    let worker = stream();
    let (memory, copied): (CUdeviceptr, CUdeviceptr) = (get!(cuMemAlloc_v2(BYTES)), get!(cuMemAlloc_v2(BYTES)));
    ok(call!(cuMemsetD8_v2(memory, 0, BYTES)));
    if fixed {
        synchronize(LEGACY);
    }
    copy(copied, memory, worker);
}

/// A stream is destroyed with work in flight. Its handle is that of another stream next, on which
/// the memory is freed.
fn destroyed_stream(fixed: bool) {
    let [gone, other] = [(); 2].map(|()| stream());
    let memory = alloc(gone);
    fill(memory, gone);
    if fixed {
        order(other, gone);
    }
    ok(call!(cuStreamDestroy_v2(gone)));
    free(memory, other);
    let new = stream();
    fill(alloc(new), new);
}

/// Copies in a batch read pinned memory after the call: it is freed too early.
fn batch_reads_late(fixed: bool) {
    let (stream, memory) = (stream(), pinned());
    let target = alloc(stream);
    let mut attributes = sys::CUmemcpyAttributes {
        srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        // SAFETY: zeros mean no hints.
        ..unsafe { std::mem::zeroed() }
    };
    let (mut to, mut from, mut bytes, mut first, mut failed) = (target, memory as CUdeviceptr, BYTES, 0, 0);
    ok(call!(cuMemcpyBatchAsync(
        &raw mut to,
        &raw mut from,
        &raw mut bytes,
        1,
        &raw mut attributes,
        &raw mut first,
        1,
        &raw mut failed,
        stream
    )));
    if fixed {
        synchronize(stream);
    }
    ok(call!(cuMemFreeHost(memory)));
}

/// A pool of pinned buffers gets one back before its copy is done, and a download takes it.
fn pinned_returned_early(fixed: bool) {
    let ([uploads, downloads], buffer) = ([(); 2].map(|()| stream()), pinned());
    let (up, down) = (alloc(uploads), alloc(downloads));
    ok(call!(cuMemcpyHtoDAsync_v2(up, buffer, BYTES, uploads)));
    if fixed {
        synchronize(uploads);
    }
    fill(down, downloads);
    ok(call!(cuMemcpyDtoHAsync_v2(buffer, down, BYTES, downloads)));
    ok(call!(cuCtxSynchronize()));
}

/// A panic leaves a capture open and frees the memory in it; the capture is ended and launched
/// later.
fn panic_in_capture(fixed: bool) {
    let [capturing, other] = [(); 2].map(|()| stream());
    let memory = alloc(other);
    order(capturing, other);
    ok(call!(cuStreamBeginCapture_v2(capturing, RELAXED)));
    fill(memory, capturing);
    if !fixed {
        free(memory, other);
    }
    let graph = ended(capturing);
    let _ = call!(cuGraphLaunch(graph, capturing));
}

/// A tensor is resized to nothing while another stream still downloads it.
fn freed_during_download(fixed: bool) {
    let ([main, side], target) = ([(); 2].map(|()| stream()), pinned());
    let memory = alloc(main);
    fill(memory, main);
    order(side, main);
    ok(call!(cuMemcpyDtoHAsync_v2(target, memory, BYTES, side)));
    if fixed {
        order(main, side);
    }
    free(memory, main);
}

/// An upload from ordinary memory returns before the device has all of it.
fn pageable_upload(fixed: bool) {
    let (worker, source) = (stream(), vec![1_u8; BYTES]);
    let (memory, copied): (CUdeviceptr, CUdeviceptr) = (get!(cuMemAlloc_v2(BYTES)), get!(cuMemAlloc_v2(BYTES)));
    ok(call!(cuMemcpyHtoD_v2(memory, source.as_ptr().cast(), BYTES)));
    if fixed {
        synchronize(LEGACY);
    }
    copy(copied, memory, worker);
}

/// Memory is used after it was freed in the order of the same stream.
fn used_after_free(fixed: bool) {
    let stream = stream();
    let memory = alloc(stream);
    if fixed {
        fill(memory, stream);
    }
    free(memory, stream);
    if !fixed {
        fill(memory, stream);
    }
}

/// Two owners free the same memory.
fn freed_twice(fixed: bool) {
    let memory: CUdeviceptr = get!(cuMemAlloc_v2(BYTES));
    ok(call!(cuMemFree_v2(memory)));
    if !fixed {
        let _ = call!(cuMemFree_v2(memory));
    }
}

/// Pinned memory is given to the call that frees device memory.
fn freed_by_another_family(fixed: bool) {
    let memory = pinned();
    if !fixed {
        let _ = call!(cuMemFree_v2(memory as CUdeviceptr));
    }
    ok(call!(cuMemFreeHost(memory)));
}

const GRANULE: usize = 2 << 20;

/// Maps new physical memory.
fn map(memory: CUdeviceptr) {
    let device = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let properties = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: device,
        // SAFETY: zeros mean no handle of another library, and no flags.
        ..unsafe { std::mem::zeroed() }
    };
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: device, flags };
    let physical = get!(cuMemCreate(GRANULE, &raw const properties, 0));
    ok(call!(cuMemMap(memory, GRANULE, 0, physical, 0)));
    ok(call!(cuMemRelease(physical)));
    ok(call!(cuMemSetAccess(memory, GRANULE, &raw const access, 1)));
}

/// Mapped memory is unmapped while work may use it.
fn unmapped_early(fixed: bool) {
    let stream = stream();
    let memory: CUdeviceptr = get!(cuMemAddressReserve(GRANULE, 0, 0, 0));
    map(memory);
    fill(memory, stream);
    if fixed {
        synchronize(stream);
    }
    ok(call!(cuMemUnmap(memory, GRANULE)));
}

/// What must not be found: blocks that go from stream to stream, memory of graphs, other memory
/// behind the addresses of a graph, threads to which one address goes after the other.
fn right(context: &Arc<CudaContext>) {
    let mut streams = [(); 3].map(|()| stream());
    for step in 0..300 {
        let [one, two] = [streams[step % 3], streams[(step + 1) % 3]];
        let [x, y] = [one, two].map(alloc);
        fill(x, one);
        order(two, one);
        copy(y, x, two);
        free(x, two);
        if step % 4 == 0 {
            ok(call!(cuMemFree_v2(y)));
        } else {
            free(y, two);
        }
        if step % 50 == 49 {
            ok(call!(cuStreamDestroy_v2(two))); // its work may still run
            streams[(step + 1) % 3] = stream();
        }
    }
    let [one, ..] = streams;
    for frees in [true, false] {
        ok(call!(cuStreamBeginCapture_v2(one, RELAXED)));
        let memory = alloc(one);
        fill(memory, one);
        if frees {
            free(memory, one);
        }
        let graph = ended(one);
        for _ in 0..3 {
            ok(call!(cuGraphLaunch(graph, one)));
            let other = alloc(one);
            if !frees {
                copy(other, memory, one);
                free(memory, one);
            }
            free(other, one);
        }
    }
    let (memory, mut graph): (CUdeviceptr, _) = (get!(cuMemAddressReserve(GRANULE, 0, 0, 0)), None);
    for _ in 0..3 {
        map(memory);
        let graph = *graph.get_or_insert_with(|| captured(memory, one));
        ok(call!(cuGraphLaunch(graph, one)));
        synchronize(one);
        ok(call!(cuMemUnmap(memory, GRANULE)));
    }
    // The checker's function, or the driver's where there is no checker: by either way the same.
    let (mut found, mut status) = (null_mut(), sys::CUdriverProcAddressQueryResult_enum::CU_GET_PROC_ADDRESS_SUCCESS);
    let name = c"cuMemcpyDtoDAsync".as_ptr();
    ok(call!(cuGetProcAddress_v2(name, &raw mut found, 12080, 0, &raw mut status)));
    // SAFETY: the library is loaded already, and only an address is taken.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("it is loaded");
    // SAFETY: as above.
    let symbol = unsafe { driver.get::<*mut c_void>(b"cuMemcpyDtoDAsync_v2\0") }.expect("it is there");
    assert_eq!(found, *symbol);
    let thread = || {
        context.bind_to_thread().expect("the context is there");
        for _ in 0..50 {
            let (own, plain): (_, CUdeviceptr) = (stream(), get!(cuMemAlloc_v2(BYTES)));
            let pooled = alloc(own);
            fill(plain, own);
            copy(pooled, plain, own);
            free(pooled, own);
            ok(call!(cuStreamDestroy_v2(own)));
            ok(call!(cuMemFree_v2(plain)));
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(thread))));
}

/// Memory is freed while a kernel of another stream may use it. Only the kernel's parameters say
/// so.
fn freed_under_a_kernel(context: &Arc<CudaContext>, fixed: bool) -> Done {
    let module = context.load_module(Ptx::from_src(include_str!("../../cudarc/examples/arithmetic.ptx")))?;
    let axpy = module.load_function("axpy_f32")?;
    let (one, two) = (context.new_stream()?, stream());
    let (x, y) = (alloc(two), alloc(two));
    fill(x, two);
    fill(y, two);
    order(one.cu_stream().cast(), two);
    let (alpha, n) = (2.0_f32, (BYTES / 4) as u64);
    let mut launch = one.launch_builder(&axpy);
    launch.arg(&y).arg(&x).arg(&alpha).arg(&n);
    // SAFETY: these are the kernel's parameters, and both have `n` elements.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1 << 18)) }?;
    if fixed {
        order(two, one.cu_stream().cast());
    }
    free(x, two);
    Ok(())
}

fn main() -> Done {
    // Kept to the end: the context is the one that all calls use.
    let context = CudaContext::new(0)?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fixed = arguments.get(1).is_some_and(|argument| argument == "fixed");
    let times = arguments.get(2).map_or(Ok(1), |times| times.parse())?;
    let name = arguments.first().map_or("right", String::as_str);
    let bugs: [Bug; 14] = [
        ("merged_free_list", merged_free_list),
        ("leftovers_of_a_region", leftovers_of_a_region),
        ("stale_graph", stale_graph),
        ("zeroed_elsewhere", zeroed_elsewhere),
        ("destroyed_stream", destroyed_stream),
        ("batch_reads_late", batch_reads_late),
        ("pinned_returned_early", pinned_returned_early),
        ("panic_in_capture", panic_in_capture),
        ("freed_during_download", freed_during_download),
        ("pageable_upload", pageable_upload),
        ("used_after_free", used_after_free),
        ("freed_twice", freed_twice),
        ("freed_by_another_family", freed_by_another_family),
        ("unmapped_early", unmapped_early),
    ];
    match (name, bugs.iter().find(|bug| bug.0 == name)) {
        ("right", _) => right(&context),
        ("freed_under_a_kernel", _) => freed_under_a_kernel(&context, fixed)?,
        (_, Some((_, bug))) => (0..times).for_each(|_| bug(fixed)),
        (other, None) => return Err(format!("no bug {other}").into()),
    }
    if arguments.get(1).is_some_and(|argument| argument == "abort") {
        std::process::abort();
    }
    // Not all bugs leave a device that can be waited for.
    let _ = context.synchronize();
    Ok(())
}
