//! Drivers that lack functions: a capability is off, or nothing starts; nothing panics.

use aquifer_cuda::CudaDriver;
use aquifer_device::{
    Attribute, CaptureStatus, Code, Copy2d, CopyEnd, CopyPart, Driver, ErrorKind, PhysicalOptions, Result, StreamFlags,
};

use crate::bench::{Bench, MIB, PTX, code, fill, standin};
use crate::faults::{PARTS, asked};

#[test]
fn without_a_required_function_nothing_starts_and_the_error_names_it() {
    let device = standin().add_device("1GiB").unwrap();
    for symbol in CudaDriver::functions().0 {
        let error = CudaDriver::open_without(device.ordinal(), &[symbol]).unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::Unavailable, Code(500)), "{symbol}");
        let said = error.to_string();
        assert!(said.contains(symbol), "{said}");
        assert_eq!(said.contains("CUDA 13.0"), symbol != "cuDriverGetVersion", "{said}");
    }
}

/// Each takes its own capability with it and no other, and leaves nothing behind.
#[test]
fn without_any_one_optional_function_all_else_works() {
    for symbol in CudaDriver::functions().1 {
        let bench = Bench::without(&[symbol]);
        let (driver, stream, memory) = (&*bench.driver, bench.stream(), bench.driver.alloc(MIB).unwrap());
        let mut off = Vec::new();
        for (name, part) in PARTS {
            if let Err(error) = part(driver, stream, memory) {
                assert_eq!(error.kind, ErrorKind::Unsupported, "{name} without {symbol}: {error}");
                off.push(name);
            }
        }
        assert!(off.len() <= 1, "without {symbol}: {off:?}");
        let asked = asked(driver, stream);
        assert_eq!(asked.is_err(), *symbol == "cuDeviceCanAccessPeer", "{symbol}: {asked:?}");
        driver.free(memory).unwrap();
        assert_eq!(bench.used(), 0, "{symbol}");
        bench.assert_no_violation();
    }
}

/// A capability that a missing function access guards off, tried.
type Try = fn(&Bench) -> Result<()>;

fn captured(bench: &Bench) -> Result<()> {
    let stream = bench.stream();
    bench.driver.begin_capture(stream)?;
    bench.driver.end_capture(stream).map(drop)
}

fn rows(bench: &Bench) -> Result<()> {
    let memory = CopyEnd::Device(bench.driver.alloc(4096)?);
    let copy = Copy2d { dst: memory, dst_pitch: 8, src: memory, src_pitch: 8, width: 8, height: 0 };
    // SAFETY: nothing is copied.
    unsafe { bench.driver.copy_2d(&copy, bench.stream()) }
}

fn batch(bench: &Bench) -> Result<()> {
    assert_eq!(bench.driver.attribute(Attribute::BatchedCopies)?, 0);
    let copies: &[CopyPart] = &[];
    // SAFETY: nothing is copied.
    unsafe { bench.driver.copy_batch(copies, bench.stream()) }
}

fn registered(bench: &Bench) -> Result<()> {
    let mut memory = vec![0_u8; 4096];
    // SAFETY: it is refused, which the test that calls this expects.
    unsafe { bench.driver.host_register(memory.as_mut_ptr(), 4096) }.map(drop)
}

fn kept(bench: &Bench) -> Result<()> {
    let stream = bench.stream();
    bench.driver.begin_capture(stream)?;
    assert_eq!(bench.driver.capture_status(stream)?, CaptureStatus::Active);
    bench.driver.keep_for_graph(stream, std::sync::Arc::new(()))
}

fn much_shared(bench: &Bench) -> Result<()> {
    let (memory, module) = (bench.driver.alloc(4096)?, bench.driver.load_module(PTX)?);
    let launch = aquifer_device::Launch { shared_bytes: 64 << 10, ..fill(Some(module), memory, 4096, 0) };
    // SAFETY: the kernel fills the range that its launch declares.
    unsafe { bench.driver.launch(&launch, bench.stream()) }
}

#[test]
fn without_an_optional_function_its_capability_is_off() {
    let off: &[(&str, Try)] = &[
        ("cuMemAllocAsync", |bench| bench.driver.alloc_async(4096, bench.stream()).map(drop)),
        ("cuMemFreeAsync", |bench| bench.driver.alloc_async(4096, bench.stream()).map(drop)),
        ("cuDeviceGetMemPool", |bench| bench.driver.pool_usage().map(drop)),
        ("cuMemPoolGetAttribute", |bench| bench.driver.pool_usage().map(drop)),
        ("cuMemPoolTrimTo", |bench| bench.driver.trim_pool(0)),
        ("cuMemGetAllocationGranularity", |bench| bench.driver.reserve(2 * MIB, 0).map(drop)),
        ("cuMemAddressReserve", |bench| bench.driver.reserve(2 * MIB, 0).map(drop)),
        ("cuMemCreate", |bench| bench.driver.create_physical(2 * MIB, PhysicalOptions::default()).map(drop)),
        ("cuMemSetAccess", |bench| bench.driver.reserve(2 * MIB, 0).map(drop)),
        ("cuDeviceCanAccessPeer", |bench| bench.driver.can_access_peer(0).map(drop)),
        ("cuMemcpyPeerAsync", |bench| {
            let memory = bench.driver.alloc(4096)?;
            bench.driver.copy_peer(memory, &*bench.driver, memory.offset(64), 64, bench.stream())
        }),
        ("cuMemHostRegister_v2", registered),
        ("cuMemHostUnregister", registered),
        ("cuMemcpy2DAsync_v2", rows),
        ("cuEventElapsedTime", |bench| {
            let event = bench.driver.create_event(true)?;
            bench.driver.elapsed_ms(event, event).map(drop)
        }),
        ("cuStreamBeginCapture_v2", captured),
        ("cuStreamEndCapture", captured),
        ("cuGraphInstantiateWithFlags", captured),
        ("cuGraphLaunch", captured),
        ("cuGraphExecDestroy", captured),
        ("cuGraphDestroy", captured),
        ("cuUserObjectCreate", kept),
        ("cuUserObjectRelease", kept),
        ("cuGraphRetainUserObject", kept),
        ("cuStreamGetCaptureInfo_v2", kept),
        ("cuFuncSetAttribute", much_shared),
    ];
    for (symbol, attempt) in off {
        let bench = Bench::without(&[symbol]);
        let error = attempt(&bench).unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::Unsupported, Code::NOT_SUPPORTED), "{symbol}: {error}");
    }
    let bench = Bench::without(&["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]);
    assert_eq!(code(batch(&bench)), Code::NOT_SUPPORTED);
    let bench = Bench::without(&["cuMemAllocAsync"]);
    assert_eq!(bench.driver.attribute(Attribute::MemoryPools).unwrap(), 0);
    let bench = Bench::without(&["cuMemMap"]);
    assert_eq!(bench.driver.info().granularity_bytes, None);
    assert_eq!(bench.driver.attribute(Attribute::GpuDirectRdmaWithVmm).unwrap(), 0);
}

#[test]
fn the_replacement_of_a_missing_function_has_the_same_effect() {
    // An older way to ask whether a stream captures.
    let bench = Bench::without(&["cuStreamGetCaptureInfo_v2"]);
    let (driver, stream) = (&*bench.driver, bench.stream());
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Active);
    driver.end_capture(stream).unwrap();
    // Streams without identities, and memory of others that no function can be asked about.
    let bench = Bench::without(&["cuStreamGetId", "cuPointerGetAttribute"]);
    let (driver, stream) = (&*bench.driver, bench.stream());
    assert_eq!(driver.stream_id(stream).unwrap(), None);
    let other = CudaDriver::open(bench.device.ordinal()).unwrap();
    let (theirs, adopted) = (other.alloc(4096).unwrap(), other.create_stream(StreamFlags::default()).unwrap());
    assert_eq!(code(driver.memset(theirs, 0, 4096, stream)), Code::INVALID_VALUE);
    // SAFETY: the stream lives until it is released below.
    unsafe { driver.adopt_stream(adopted) };
    assert!(driver.query_stream(adopted).unwrap());
    driver.release_stream(adopted);
}
