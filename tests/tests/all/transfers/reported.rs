//! Defects of transfers that users of other libraries reported. Numbers in names are those of the
//! reports; numbers without a name are PyTorch's. `reported_page_locked.rs` has the defects of
//! pinned memory.

use aquifer::Error;
use aquifer::transfer::{Region, TransferError};
use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;

use super::{Bench, to_device, to_pinned, to_vec};

/// A copy that should not block did, because its memory was pageable, and no error said so.
#[test]
fn waits_are_counted_and_copies_that_need_none_do_not_wait() {
    let bench = Bench::new();
    let host = bench.transfer.pinned().alloc_from(&pattern(3, 1 << 20)).unwrap();
    let mut buffer = bench.alloc(1 << 20);
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    let before = bench.transfer.counters().synchronisations;
    let on = bench.transfer.on(&bench.stream).unwrap();
    let pending = buffer.upload(&host, &on).unwrap();
    if Subject::is_simulated() {
        assert!(!pending.is_done().unwrap(), "the call returned although the stream is busy");
    }
    assert_eq!(bench.transfer.counters().synchronisations, before);
    pending.wait().unwrap();
    // What does wait is counted.
    buffer.slice(7..=7).item(&bench.transfer).unwrap();
    let many = buffer.item(&bench.transfer).unwrap_err();
    assert!(matches!(many, Error::NotOneElement { .. }), "{many:?}");
    assert!(bench.transfer.counters().synchronisations > before);
    drop((host, buffer));
    bench.finish();
}

/// Memory and streams of two devices were mixed up, and the error named neither.
#[test]
fn errors_name_both_devices() {
    let (one, two) = (Bench::new(), Bench::new());
    let opened = |bench: &Bench, when: &str| format!("{} as opened {when}", bench.device.label());
    let host = one.transfer.pinned().alloc_from(&[1u8; 64]).unwrap();
    let mut buffer = two.alloc(64);
    for error in [
        buffer.upload(&host, &one.transfer).unwrap_err(),
        buffer.upload(&host, &two.transfer).unwrap_err(),
        one.transfer.on(&two.stream).unwrap_err(),
        to_pinned(&one.transfer, &buffer).unwrap_err(),
    ] {
        let text = error.to_string();
        let Error::Request(RequestError::WrongDevice { devices, .. }) = error else { panic!("{text}") };
        let (is, needed) = (devices.is.to_string(), devices.needed.to_string());
        assert!(text.contains(&is) && text.contains(&needed), "{text}");
        let mut named = [is, needed];
        named.sort_unstable();
        // Both are opened as the same device, but on a stand-in, where each has a number of its
        // own.
        let mut both = if one.device.label() == two.device.label() {
            [opened(&one, "earlier"), opened(&two, "later")]
        } else {
            [&one, &two].map(|bench| bench.device.label().to_string())
        };
        both.sort_unstable();
        assert_eq!(named, both);
    }
    drop((host, buffer));
    one.finish();
    two.finish();
}

/// A copy with memory that its own thread had an access guard on waited for ever.
#[test]
fn copies_and_kernels_under_an_access_guard_of_the_same_thread_are_refused() {
    let bench = Bench::new();
    let mut buffer = bench.alloc(1 << 20);
    let (same, host) = (buffer.share(), bench.transfer.pinned().alloc_from(&[1u8; 1 << 20]).unwrap());
    let access = AccessGuard::acquire(&bench.stream, &[(same.storage(), AccessKind::Read)]).unwrap();
    for refused in [
        buffer.upload(&host, &bench.transfer).map(drop).unwrap_err(),
        buffer.upload(vec![1; 1 << 20], &bench.transfer).map(drop).unwrap_err(),
        to_vec(&bench.transfer, &buffer).map(drop).unwrap_err(),
    ] {
        assert!(matches!(refused, Error::Alloc(AllocError::AccessHeld)), "{refused}");
    }
    let kernel = bench.transfer.allocator().kernels().unwrap().fill(&bench.stream, &mut buffer, 1u8).unwrap_err();
    assert_eq!(kernel.to_string(), format!("kernel fill: {}", AllocError::AccessHeld));
    drop(access);
    buffer.upload(&host, &bench.transfer).unwrap().wait().unwrap();
    drop((buffer, same, host));
    bench.finish();
}

/// A copy overtook the kernel that wrote its source, as each was on a stream of its own.
#[test]
fn copies_come_after_the_work_that_wrote_their_source() {
    let bench = Bench::new();
    let mut buffer = bench.alloc(1 << 16);
    let kernels = bench.transfer.allocator().kernels().unwrap();
    for round in 0..20u8 {
        kernels.spin(&bench.stream, Duration::from_micros(50)).unwrap();
        kernels.fill(&bench.stream, &mut buffer, round).unwrap();
        let back = to_pinned(&bench.transfer, &buffer).unwrap().wait().unwrap();
        assert!(back.read().unwrap().iter().all(|&byte| byte == round));
    }
    // And the other way round: work comes after the copy that brings its input.
    let host = bench.transfer.pinned().alloc_from(&[42u8; 1 << 16]).unwrap();
    drop(buffer.upload(&host, &bench.transfer).unwrap());
    {
        let _access = AccessGuard::acquire(&bench.stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
        let mut bytes = [0; 4];
        bench.stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
        assert_eq!(bytes, [42; 4]);
    }
    drop((buffer, host));
    bench.finish();
}

/// Copies of pageable memory in a captured graph read memory that was gone when the graph ran.
#[test]
fn transfers_on_a_capturing_stream_are_refused_and_the_capture_goes_on() {
    let bench = Bench::new();
    let host = bench.transfer.pinned().alloc_from(&[1u8; 64]).unwrap();
    let mut buffer = bench.alloc(64);
    let on = bench.transfer.on(&bench.stream).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    assert!(buffer.upload(&host, &on).is_err());
    assert!(to_vec(&on, &buffer).is_err());
    assert!(buffer.upload(vec![1u8; 64], &on).is_err());
    drop(capture.end().unwrap());
    buffer.upload(&host, &on).unwrap().wait().unwrap();
    drop((host, buffer, on));
    bench.finish();
}

/// Work that was handed over before a capture began does not depend on the capturing stream.
#[test]
fn transfers_that_were_accepted_do_not_fail_because_streams_capture_later() {
    let bench = Bench::new();
    let (bytes, len) = (pattern(7, 4 << 20), 4 << 20);
    // What the stream does takes so long that the threads of the ring would ask about it during the
    // capture.
    let write = |buffer: &Buffer<u8>| {
        let _access = AccessGuard::acquire(&bench.stream, &[(buffer.storage(), AccessKind::Write)]).unwrap();
        bench.driver.stall(&bench.stream, Duration::from_millis(1)).unwrap();
        bench.stream.fill(buffer.ptr(), 1, len).unwrap();
    };
    let captured = |during: &mut dyn FnMut()| {
        let capture = bench.stream.begin_capture().unwrap();
        during();
        drop(capture.end().unwrap());
    };
    for _ in 0..4 {
        let mut buffer = bench.alloc(len);
        write(&buffer);
        let mut upload = Some(buffer.upload(bytes.clone(), &bench.transfer).unwrap());
        captured(&mut || upload.take().unwrap().wait().unwrap());
        assert_eq!(bench.read(&buffer), bytes);
        write(&buffer);
        let mut download = Some(to_vec(&bench.transfer, &buffer).unwrap());
        captured(&mut || assert!(download.take().unwrap().wait().unwrap().iter().all(|&byte| byte == 1)));
        // Without waiting.
        drop(buffer.upload(bytes.clone(), &bench.transfer).unwrap());
        captured(&mut || std::thread::sleep(Duration::from_millis(5)));
        assert_eq!(bench.read(&buffer), bytes);
        // Memory of a stream that works.
        let mut made = Some(to_device(&bench.transfer, bytes.clone(), &bench.stream).unwrap());
        let mut made_buffer = None;
        captured(&mut || made_buffer = Some(made.take().unwrap().wait().unwrap()));
        assert_eq!(bench.read(&made_buffer.unwrap()), bytes);
    }
    bench.finish();
}

/// A capture recorded chunks of a transfer, and each launch copied them again after their memory
/// had been reused.
#[test]
fn no_part_of_a_transfer_gets_into_a_graph() {
    let bench = Bench::new();
    let on = bench.transfer.on(&bench.stream).unwrap();
    let mut buffer = bench.alloc(1 << 20);
    for round in 0..60 {
        bench.transfer.allocator().kernels().unwrap().fill(&bench.stream, &mut buffer, 1u8).unwrap();
        bench.stream.synchronize().unwrap();
        let upload = buffer.upload(vec![7u8; 1 << 20], &on).unwrap();
        std::thread::sleep(Duration::from_micros(20 * round));
        let capture = bench.stream.begin_capture().unwrap();
        std::thread::sleep(Duration::from_micros(300));
        let graph = capture.end().unwrap();
        drop(capture);
        match upload.wait() {
            Ok(()) => assert!(bench.read(&buffer).iter().all(|&byte| byte == 7)),
            Err(error) => assert!(error.to_string().contains("captur"), "{error}"),
        }
        bench.transfer.allocator().kernels().unwrap().fill(&bench.stream, &mut buffer, 1u8).unwrap();
        bench.stream.synchronize().unwrap();
        {
            let _access = AccessGuard::acquire(&bench.stream, &[(buffer.storage(), AccessKind::Write)]).unwrap();
            graph.launch(&bench.stream).unwrap();
        }
        assert!(bench.read(&buffer).iter().all(|&byte| byte == 1), "it was empty");
    }
    drop((buffer, on));
    bench.finish();
}

/// The same for copies that another thread makes while the stream's owner captures.
#[test]
fn no_copy_of_another_thread_gets_into_a_graph() {
    let bench = Bench::new();
    let on = bench.transfer.on(&bench.stream).unwrap();
    let host = bench.transfer.pinned().alloc_from(&[7u8; 64]).unwrap();
    let mut buffer = bench.alloc(64);
    let graphs: Vec<_> = std::thread::scope(|scope| {
        let captures = scope.spawn(|| {
            let capture = || bench.stream.begin_capture().unwrap().end().unwrap();
            (0..400).map(|_| capture()).collect()
        });
        while !captures.is_finished() {
            match buffer.upload(&host, &on) {
                Ok(upload) => drop(upload),
                Err(error) => assert!(error.to_string().contains("captur"), "{error}"),
            }
        }
        captures.join().unwrap()
    });
    bench.transfer.allocator().kernels().unwrap().fill(&bench.stream, &mut buffer, 1u8).unwrap();
    bench.stream.synchronize().unwrap();
    for graph in &graphs {
        let _access = AccessGuard::acquire(&bench.stream, &[(buffer.storage(), AccessKind::Write)]).unwrap();
        graph.launch(&bench.stream).unwrap();
    }
    assert_eq!(bench.read(&buffer), [1; 64], "they were empty");
    drop((graphs, buffer, host, on));
    bench.finish();
}

/// After a device was lost, waits did not return.
#[test]
fn a_lost_device_wakes_all_waiting_tasks_with_the_error() {
    use aquifer::device::sim::Fault;
    use aquifer_device::{Code, Operation};
    let bench = Bench::new();
    let buffer = bench.alloc(1 << 20);
    let mut waiting = Vec::new();
    bench.driver.inject(Fault::Nth { operation: Some(Operation::SynchronizeEvent), nth: 1, code: Code(719) });
    for _ in 0..4 {
        match to_pinned(&bench.transfer, &buffer) {
            Ok(pending) => waiting.push(std::thread::spawn(move || pollster::block_on(pending))),
            // Those that came before were quick to lose it.
            Err(error) => assert!(error.is_device_lost(), "{error}"),
        }
    }
    let results: Vec<_> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
    // Some may have been done before the device was lost.
    for error in results.into_iter().filter_map(Result::err) {
        assert!(error.is_device_lost(), "{error}");
    }
}

/// A copy between devices was ordered after the work of one of them alone.
#[test]
fn copies_between_devices_are_ordered_on_both() {
    let (one, two) = (Bench::new(), Bench::new());
    let kernels = [one.transfer.allocator().kernels().unwrap(), two.transfer.allocator().kernels().unwrap()];
    let (mut source, mut target) = (one.alloc(1 << 20), two.alloc(1 << 20));
    for round in 0..8u8 {
        // A busy stream writes the source, and again right after, without a wait on the host.
        kernels[0].spin(&one.stream, Duration::from_micros(100)).unwrap();
        kernels[0].fill(&one.stream, &mut source, round).unwrap();
        kernels[1].fill(&two.stream, &mut target, 0xEEu8).unwrap();
        drop(two.transfer.copy(&source, &mut target).unwrap());
        kernels[0].fill(&one.stream, &mut source, 0xAAu8).unwrap();
        let back = two.read(&target);
        assert!(back.iter().all(|&byte| byte == round), "round {round}");
    }
    // The source goes back to its allocator while it may still be read.
    drop(two.transfer.copy(&source, &mut target).unwrap());
    drop(source);
    let mut again = one.alloc(1 << 20);
    kernels[0].fill(&one.stream, &mut again, 0x55u8).unwrap();
    let back = two.read(&target);
    assert!(back.iter().all(|&byte| byte == 0xAA));
    drop((again, target, kernels));
    one.finish();
    two.finish();
}

/// The first of many small copies waited for all work of the stream that it was made for.
#[test]
fn the_first_batch_does_not_wait_for_the_stream() {
    // Where tests share a device, a thread that another test left may wait for a longer stall, and
    // so let the device's time pass.
    let tries = if Subject::is_shared() { 4 } else { 1 };
    assert!((0..tries).any(|_| first_batch_leaves_the_stream_busy()), "the stream was waited for");
}

fn first_batch_leaves_the_stream_busy() -> bool {
    let bench = Bench::new();
    let on = bench.transfer.on(&bench.stream).unwrap();
    let mut buffers = [bench.alloc(1000), bench.alloc(1000)];
    // On hardware, longer than the batch takes.
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    let last = bench.stream.tick();
    last.cover().unwrap();
    let mut batch = on.batch();
    buffers.iter_mut().for_each(|buffer| batch.upload(&[7u8; 1000], buffer).unwrap());
    let pending = batch.run().unwrap();
    let is_busy = !last.is_done().unwrap();
    pending.wait().unwrap();
    for buffer in &buffers {
        assert_eq!(bench.read(buffer), [7; 1000]);
    }
    drop((on, buffers, last));
    bench.finish();
    is_busy
}

/// Rows that one call read had been written by an earlier one.
#[test]
fn a_region_that_overlaps_its_source_is_refused() {
    let bench = Bench::new();
    let bytes = pattern(5, 24);
    let buffer = bench.send(bytes.len(), bytes.clone());
    let copy = |from: std::ops::Range<usize>, to: std::ops::Range<usize>, strides: [[usize; 2]; 2]| {
        let region = Region { extents: &[4, 2], from_strides: &strides[0], to_strides: &strides[1] };
        let (from, mut to) = (buffer.slice(from), buffer.slice(to).share());
        bench.transfer.copy(region.of(&from), &mut to).map(|pending| pending.wait().unwrap())
    };
    let refused = copy(0..8, 1..17, [[2, 1], [2, 9]]);
    assert!(matches!(refused, Err(Error::Transfer(TransferError::Region { .. }))), "{refused:?}");
    assert_eq!(bench.read(&buffer), bytes, "nothing was copied");
    // Between each other they may lie.
    copy(0..24, 2..24, [[6, 1], [6, 1]]).unwrap();
    let expected: Vec<u8> = (0..24).map(|at| if at % 6 / 2 == 1 { bytes[at - 2] } else { bytes[at] }).collect();
    assert_eq!(bench.read(&buffer), expected);
    drop(buffer);
    bench.finish();
}

/// All devices of a process shared one map of their memory and its locks. A thread that is blocked
/// while memory runs out on one device blocks neither another device nor pinned memory.
#[test]
fn a_blocked_device_blocks_no_other_118550() {
    let (held_up, other) = (Bench::new(), Bench::seeded(1));
    let (begun, begins) = std::sync::mpsc::channel();
    let (go, goes) = std::sync::mpsc::channel::<()>();
    let goes = Mutex::new(goes);
    let allocator = held_up.transfer.allocator().clone();
    let registration = allocator.register_reclaimer(0, "held up", move |_| {
        begun.send(()).unwrap();
        // An end of the channel is as good.
        let _ = goes.lock().unwrap().recv();
        0
    });
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| allocator.alloc::<u8>(1 << 40, &held_up.stream).is_err());
        begins.recv().unwrap();
        for round in 0..10 {
            let sent = pattern(round, 10_000);
            let buffer = other.send(sent.len(), sent.clone());
            assert_eq!(other.read(&buffer), sent);
            let host = held_up.transfer.pinned().alloc_from(&sent).unwrap();
            assert_eq!(host.read().unwrap(), sent);
        }
        drop(go);
        assert!(refused.join().unwrap(), "no device has so much");
    });
    drop((registration, allocator));
    held_up.finish();
    other.finish();
}
