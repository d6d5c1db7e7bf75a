//! Copies of rows and batches of copies, registered host memory, modules, and the facts that the
//! driver reports about pools and captures.

use aquifer_device::AccessKind::Write;
use aquifer_device::{
    CaptureStatus, Code, Copy2d, CopyEnd, CopyPart, Driver, ErrorKind, HostPtr, Launch, RawStream, Result,
};
use aquifer_sim::ViolationKind;
use proptest::prelude::*;

use crate::common::{MIB, Short, code, device};

/// Pinned memory with the given bytes in it.
fn pinned(driver: &dyn Driver, bytes: &[u8]) -> HostPtr {
    let host = driver.host_alloc(bytes.len()).unwrap();
    // SAFETY: the memory was just allocated with this length and nothing else uses it.
    unsafe { host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    host
}

fn copy_2d(driver: &dyn Driver, copy: Copy2d, stream: RawStream) -> Result<()> {
    // SAFETY: the host memory of these tests lives to their end and is not touched meanwhile.
    unsafe { driver.copy_2d(&copy, stream) }
}

fn copy_batch(driver: &dyn Driver, copies: &[CopyPart], stream: RawStream) -> Result<()> {
    // SAFETY: as for `copy_2d`.
    unsafe { driver.copy_batch(copies, stream) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn rows_arrive_where_they_belong_and_nothing_else_changes(
        width in 1u64..40, height in 1u64..20, dst_gap in 0u64..9, src_gap in 0u64..9, from_host: bool,
    ) {
        let driver = device(1);
        let stream = driver.stream();
        let (dst_pitch, src_pitch) = (width + dst_gap, width + src_gap);
        let source: Vec<u8> = (0..src_pitch * height).map(|at| (at % 251) as u8).collect();
        let (host, memory, from) = (pinned(&*driver, &source), driver.alloc(MIB).unwrap(), driver.alloc(MIB).unwrap());
        driver.memset(memory, 0xEE, dst_pitch * height, stream).unwrap();
        driver.put(from, &source, stream).unwrap();
        let src = if from_host { CopyEnd::Host(host) } else { CopyEnd::Device(from) };
        let copy = Copy2d { dst: CopyEnd::Device(memory), dst_pitch, src, src_pitch, width, height };
        copy_2d(&*driver, copy, stream).unwrap();
        let back = driver.host_alloc(usize::try_from(width * height).unwrap()).unwrap();
        let (dst, src) = (CopyEnd::Host(back), CopyEnd::Device(memory));
        let packed = Copy2d { dst, dst_pitch: width, src, src_pitch: dst_pitch, width, height };
        copy_2d(&*driver, packed, stream).unwrap();
        let got = driver.get(memory, usize::try_from(dst_pitch * height).unwrap(), stream).unwrap();
        for row in 0..height {
            for at in 0..dst_pitch {
                let expected = if at < width { source[usize::try_from(row * src_pitch + at).unwrap()] } else { 0xEE };
                prop_assert_eq!(got[usize::try_from(row * dst_pitch + at).unwrap()], expected);
            }
        }
        driver.synchronize().unwrap();
        // SAFETY: the device is done with the memory, which has this length.
        let rows = unsafe { std::slice::from_raw_parts(back.as_ptr(), usize::try_from(width * height).unwrap()) };
        let expected = (0..height).flat_map(|row| (0..width).map(move |at| row * src_pitch + at));
        prop_assert!(expected.zip(rows).all(|(at, &byte)| source[usize::try_from(at).unwrap()] == byte));
        prop_assert!(driver.violations().is_empty());
    }
}

#[test]
fn a_batch_is_one_call_and_its_copies_must_be_independent() {
    let driver = device(2);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let host = pinned(&*driver, b"abcdefgh");
    let part = |to: u64, from: usize, bytes| CopyPart {
        dst: CopyEnd::Device(memory.offset(to)),
        src: CopyEnd::Host(HostPtr(host.0 + from)),
        bytes,
    };
    let calls = driver.calls_made();
    copy_batch(&*driver, &[part(0, 4, 4), part(100, 0, 4), part(7, 0, 0)], stream).unwrap();
    assert_eq!(driver.calls_made() - calls, 1);
    assert_eq!(driver.get(memory, 4, stream).unwrap(), b"efgh");
    assert_eq!(driver.get(memory.offset(100), 4, stream).unwrap(), b"abcd");

    assert_eq!(code(copy_batch(&*driver, &[part(0, 0, 4), part(3, 4, 4)], stream)), Code::INVALID_VALUE);
    let chain = CopyPart { dst: CopyEnd::Device(memory.offset(50)), src: CopyEnd::Device(memory), bytes: 4 };
    assert_eq!(code(copy_batch(&*driver, &[part(0, 0, 4), chain], stream)), Code::INVALID_VALUE);
    let on_host = CopyPart { dst: CopyEnd::Host(host), src: CopyEnd::Host(HostPtr(host.0 + 4)), bytes: 4 };
    assert_eq!(code(copy_batch(&*driver, &[on_host], stream)), Code::INVALID_VALUE);
    let pageable = [0u8; 4];
    let source = CopyEnd::Host(HostPtr(pageable.as_ptr().addr()));
    let refused = CopyPart { dst: CopyEnd::Device(memory), src: source, bytes: 4 };
    assert_eq!(code(copy_batch(&*driver, &[refused], stream)), Code::INVALID_VALUE);
    copy_batch(&*driver, &[], stream).unwrap();
    // As CUDA's, which takes no batches there.
    for legacy in [RawStream(0), RawStream::LEGACY] {
        assert_eq!(code(copy_batch(&*driver, &[part(0, 4, 4)], legacy)), Code::NOT_SUPPORTED);
    }
}

#[test]
fn impossible_rows_are_refused() {
    let driver = device(3);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let place = CopyEnd::Device(memory);
    let copy = |dst_pitch, src, width, height| Copy2d { dst: place, dst_pitch, src, src_pitch: 16, width, height };
    let further = CopyEnd::Device(memory.offset(8));
    for (case, refused) in [
        ("short pitch", copy(8, CopyEnd::Device(memory.offset(4096)), 9, 2)),
        ("overlap", copy(16, CopyEnd::Device(memory.offset(4)), 8, 2)),
        ("too many rows", copy(16, further, 8, u64::MAX / 16)),
    ] {
        assert_eq!(code(copy_2d(&*driver, refused, stream)), Code::INVALID_VALUE, "{case}");
    }
    // Interleaved rows touch nothing of each other.
    copy_2d(&*driver, copy(16, further, 8, 4), stream).unwrap();
    copy_2d(&*driver, copy(16, further, 8, 0), stream).unwrap();
    assert!(driver.violations().is_empty());
}

#[test]
fn the_race_detector_sees_every_row() {
    let driver = device(4);
    let (one, two) = (driver.stream(), driver.stream());
    let memory = driver.alloc(MIB).unwrap();
    let (dst, src) = (CopyEnd::Device(memory), CopyEnd::Device(memory.offset(4096)));
    copy_2d(&*driver, Copy2d { dst, dst_pitch: 64, src, src_pitch: 64, width: 8, height: 4 }, one).unwrap();
    driver.kernel("between the rows", &[(memory.offset(8), 8, Write)], None, two).unwrap();
    assert!(driver.violations().is_empty());
    driver.kernel("third row", &[(memory.offset(128), 1, Write)], None, two).unwrap();
    let found = driver.take_violations();
    assert_eq!(found.len(), 1);
    assert!(found[0].to_string().contains("cuMemcpy2DAsync"), "{}", found[0]);
}

#[test]
fn registered_memory_is_page_locked_until_it_is_unregistered() {
    let driver = device(5);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let mut own = vec![7u8; 4096];
    let start = own.as_mut_ptr();
    // SAFETY: the vector lives to the end of the test, and is unregistered before it is touched
    // again.
    let host = unsafe { driver.host_register(start, 4096) }.unwrap();
    // SAFETY: refused, since the memory is registered.
    assert_eq!(code(unsafe { driver.host_register(start.wrapping_add(100), 8) }), Code(712));
    // SAFETY: refused: it is registered.
    assert_eq!(code(unsafe { driver.host_free(host) }), Code::INVALID_VALUE);
    driver.upload(memory, HostPtr(host.0 + 10), 100, stream);
    driver.stall(stream, std::time::Duration::from_millis(1)).unwrap();
    driver.kernel("later", &[(memory, 100, Write)], None, stream).unwrap();
    driver.download(host, memory.offset(4096), 16, stream);
    // It was not waited for, so that is a violation; the work still ran while the memory was
    // there. SAFETY: it was registered above, and only the simulator counts on that.
    unsafe { driver.host_unregister(host) }.unwrap();
    assert_eq!(driver.take_violations()[0].kind, ViolationKind::PendingWork);
    assert_eq!(own[..16], [0xCD; 16]);
    // SAFETY: refused: it is not registered any more.
    assert_eq!(code(unsafe { driver.host_unregister(host) }), Code(713));
    // SAFETY: refused.
    assert_eq!(code(unsafe { driver.host_register(std::ptr::null_mut(), 8) }), Code::INVALID_VALUE);
}

#[test]
fn unregistering_is_refused_while_a_stream_captures() {
    let driver = device(5);
    let stream = driver.stream();
    let mut own = vec![7u8; 4096];
    // SAFETY: the vector lives to the end of the test.
    let host = unsafe { driver.host_register(own.as_mut_ptr(), 4096) }.unwrap();
    driver.begin_capture(stream).unwrap();
    // SAFETY: refused.
    assert_eq!(code(unsafe { driver.host_unregister(host) }), Code::CAPTURE_UNSUPPORTED);
    driver.end_capture(stream).expect("the capture goes on");
    // SAFETY: registered above, and no work uses it.
    unsafe { driver.host_unregister(host) }.unwrap();
}

#[test]
fn a_graph_over_memory_that_was_unregistered_is_caught() {
    let driver = device(6);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let mut own = vec![7u8; 64];
    // SAFETY: the vector lives to the end of the test.
    let host = unsafe { driver.host_register(own.as_mut_ptr(), 64) }.unwrap();
    driver.begin_capture(stream).unwrap();
    driver.upload(memory, host, 64, stream);
    let graph = driver.end_capture(stream).unwrap();
    // SAFETY: it was registered above; the memory lives on while the graph is launched.
    unsafe { driver.host_unregister(host) }.unwrap();
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(driver.take_violations()[0].kind, ViolationKind::UseAfterFree);
    assert!(driver.synchronize().unwrap_err().is_device_lost());
}

#[test]
fn modules_hold_the_kernels_that_their_text_declares() {
    let driver = device(7);
    let stream = driver.stream();
    let module = driver.load_module(".version 8.2\n.target sm_75\n.visible .entry one(.param .u64 a) {}").unwrap();
    let launch = |name, module| {
        let (grid, block) = ([1; 3], [1; 3]);
        let (args, accesses) = (Vec::new(), Vec::new());
        let launch = Launch { name, module: Some(module), grid, block, args, accesses, ..Launch::default() };
        // SAFETY: the kernel computes nothing.
        unsafe { driver.launch(&launch, stream) }
    };
    launch("one", module).unwrap();
    assert_eq!(code(launch("two", module)), Code(500));
    assert_eq!(code(driver.load_module("no ptx")), Code(218));
    assert_eq!(code(driver.load_module(".version 8.6 .target sm_120")), Code(209));
    driver.unload_module(module).unwrap();
    assert_eq!(code(launch("one", module)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.unload_module(module)), Code::INVALID_HANDLE);
}

#[test]
fn the_pool_reports_its_usage() {
    let driver = device(8);
    let stream = driver.stream();
    let memory = driver.alloc_async(MIB, stream).unwrap();
    let plain = driver.alloc(MIB).unwrap();
    let usage = driver.pool_usage().unwrap();
    assert_eq!((usage.used, usage.used_peak, usage.reserved), (MIB, MIB, MIB));
    driver.free_async(memory, stream).unwrap();
    driver.free(plain).unwrap();
    driver.trim_pool(0).unwrap();
    let usage = driver.pool_usage().unwrap();
    assert_eq!((usage.used, usage.used_peak, usage.reserved_peak), (0, MIB, MIB));
}

#[test]
fn memory_that_the_driver_keeps_is_trimmed_on_request() {
    let driver = device(8);
    let free = || driver.memory_info().unwrap().free;
    let all = free();
    driver.set_kept_bytes(3 * MIB, 2 * MIB);
    assert_eq!((free(), driver.pool_usage().unwrap().reserved), (all - 5 * MIB, 3 * MIB));
    assert_eq!(driver.alloc(all - 4 * MIB).unwrap_err().kind, ErrorKind::OutOfMemory);
    driver.trim_pool(MIB).unwrap();
    assert_eq!(free(), all - 3 * MIB);
    driver.trim_graph_memory().unwrap();
    driver.trim_pool(0).unwrap();
    assert_eq!(free(), all);
}

#[test]
fn a_stream_reports_its_capture_and_its_identity() {
    let driver = device(9);
    let stream = driver.blocking_stream();
    let first = driver.stream_id(stream).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Active);
    assert_eq!(code(driver.capture_status(RawStream::LEGACY)), Code::CAPTURE_IMPLICIT);
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Active);
    assert_eq!(code(driver.synchronize()), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Invalidated);
    assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_INVALIDATED);
    assert_eq!(driver.capture_status(RawStream::LEGACY).unwrap(), CaptureStatus::None);
    driver.destroy_stream(stream).unwrap();
    let again = driver.blocking_stream();
    assert_eq!(again, stream, "the handle comes back");
    assert_ne!(driver.stream_id(again).unwrap(), first, "the stream is another one");
}
