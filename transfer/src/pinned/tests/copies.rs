//! Buffers while copies use them.

use aquifer_device::RequestError;

use super::*;

#[test]
fn uploaded_bytes_are_downloaded_again() {
    let bench = Bench::new(PinnedConfig::default());
    let down = bench.device.stream().unwrap();
    let values: Vec<u8> = (0..=255).collect();
    let source = bench.pool.alloc_from(&values, 1).unwrap();
    let mut target = bench.pool.alloc_zeroed(256, 1).unwrap();
    bench.upload(&source).unwrap();
    down.wait_for(&bench.stream.tick()).unwrap();
    download(target.all_mut().host(), bench.memory, &down, &bench.device).unwrap();
    assert!(!target.is_idle().unwrap());
    assert_eq!(target.read().unwrap(), values);
    assert!(target.is_idle().unwrap());
    assert_eq!(bench.pool.stats().num_waits, 1);
    drop((source, target));
    bench.check_over();
}

/// PyTorch's test_caching_pinned_memory.
#[test]
fn memory_is_reused_at_once_when_idle_and_not_while_a_copy_is_in_flight() {
    let bench = Bench::new(PinnedConfig::default());
    let buffer = bench.pool.alloc(1 << 20, 1).unwrap();
    let first = address(&buffer);
    drop(buffer);
    let buffer = bench.pool.alloc_zeroed(1 << 20, 1).unwrap();
    assert_eq!(address(&buffer), first, "idle memory is reused");
    bench.upload(&buffer).unwrap();
    assert_eq!(bench.calls_in(|| drop(buffer)).total(), 0, "dropping makes no driver call");
    let other = bench.pool.alloc_zeroed(1 << 20, 1).unwrap();
    assert_ne!(address(&other), first, "a copy is in flight");
    bench.stream.synchronize().unwrap();
    let again = bench.pool.alloc_zeroed(1 << 20, 1).unwrap();
    assert_eq!(address(&again), first, "the copy is done");
    drop((other, again));
    bench.check_over();
}

#[test]
fn a_cached_request_and_its_drop_make_no_driver_call() {
    let bench = Bench::new(PinnedConfig::default());
    drop(bench.pool.alloc(100_000, 1).unwrap());
    let calls = bench.calls_in(|| (0..100).for_each(|_| drop(bench.pool.alloc(100_000, 1).unwrap())));
    assert_eq!(calls.total(), 0);
    bench.check_over();
}

#[test]
fn writing_waits_for_uploads_and_reading_does_not() {
    let bench = Bench::new(PinnedConfig::default());
    let mut buffer = bench.pool.alloc_zeroed(1 << 20, 1).unwrap();
    bench.upload(&buffer).unwrap();
    assert_eq!(buffer.read().unwrap()[5], 0);
    assert_eq!(bench.pool.stats().num_waits, 0);
    buffer.write().unwrap().fill(9);
    assert_eq!(bench.pool.stats().num_waits, 1);
    let mut bytes = [1; 4];
    bench.stream.download_blocking(&mut bytes, bench.memory).unwrap();
    assert_eq!(bytes, [0; 4]);
    drop(buffer);
    bench.check_over();
}

#[test]
fn a_download_comes_after_uploads_on_other_streams_from_the_same_memory() {
    let bench = Bench::new(PinnedConfig::default());
    let streams: Vec<_> = (0..3).map(|_| bench.device.stream().unwrap()).collect();
    let mut buffer = bench.pool.alloc_from(&vec![3_u8; 1 << 20], 1).unwrap();
    for (place, stream) in streams.iter().enumerate() {
        let to = bench.memory.offset((1 + place as u64) << 20);
        upload(buffer.all().host(), to, stream, &bench.device).unwrap();
    }
    bench.stream.fill(bench.memory, 5, 1 << 20).unwrap();
    bench.download(&mut buffer).unwrap();
    assert!(buffer.read().unwrap().iter().all(|&byte| byte == 5));
    let mut bytes = vec![0; 3 << 20];
    bench.stream.download_blocking(&mut bytes, bench.memory.offset(1 << 20)).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 3));
    drop(buffer);
    bench.check_over();
}

#[test]
fn queries_of_the_driver_end_while_streams_are_busy() {
    let bench = Bench::new(PinnedConfig::default());
    let other = bench.device.stream().unwrap();
    let [quick, slow, slower] = [(); 3].map(|()| bench.pool.alloc_zeroed(16 << 20, 1).unwrap());
    let (here, there) = (bench.memory, bench.memory.offset(32 << 20));
    upload(quick.part(0..1).unwrap().host(), there, &other, &bench.device).unwrap();
    for _ in 0..50 {
        upload(slow.all().host(), here, &bench.stream, &bench.device).unwrap();
        upload(slower.all().host(), there, &other, &bench.device).unwrap();
    }
    drop((quick, slow, slower));
    let reserved = bench.pool.stats().allocated_bytes.current;
    while bench.pool.stats().active_requests.current == 3 {
        bench.pool.trim_to(reserved).unwrap();
    }
    assert_eq!(bench.pool.stats().active_requests.current, 2);
    bench.check_over();
}

#[test]
fn memory_of_another_device_and_captures_are_refused() {
    let (bench, other) = (Bench::new(PinnedConfig::default()), Bench::new(PinnedConfig::default()));
    let buffer = bench.pool.alloc(10, 1).unwrap();
    let part = buffer.all().host();
    let wrong = part.memory.access(&other.stream, AccessKind::Read).unwrap_err();
    assert!(matches!(wrong, TransferError::Request(RequestError::WrongDevice { .. })), "{wrong}");
    let capture = bench.stream.begin_capture().unwrap();
    let refused = part.memory.access(&bench.stream, AccessKind::Read).unwrap_err();
    assert!(refused.to_string().contains("capture"), "{refused}");
    drop(capture);
    part.memory.access(&bench.stream, AccessKind::Read).map(drop).unwrap();
}

/// No bytes, and any alignment.
#[test]
fn lengths_and_alignments() {
    let bench = Bench::new(PinnedConfig::default());
    let mut empty = bench.pool.alloc(0, 8).unwrap();
    assert!(empty.bytes() == 0 && empty.read().unwrap().is_empty() && empty.write().unwrap().is_empty());
    let aligned = bench.pool.alloc(24_576, 8192).unwrap();
    assert!(address(&aligned).is_multiple_of(8192) && aligned.bytes() == 24_576);
    assert_eq!(bench.pool.alloc(1, 0).unwrap().bytes(), 1);
    let error = bench.pool.alloc(1 << 62, 1).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop((empty, aligned));
    bench.check_over();
}

#[test]
fn parts_stay_inside() {
    let bench = Bench::new(PinnedConfig::default());
    let mut block = bench.pool.alloc_from(&[1, 2, 3, 4, 5], 1).unwrap();
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = 3..2;
    for range in [2..6, reversed, 6..6] {
        let refused = block.part(range).unwrap_err();
        assert!(matches!(refused, TransferError::Request(RequestError::OutOfBounds { len: 5, .. })), "{refused}");
    }
    assert!(block.all_mut().split_at(6).is_err());
    let (head, mut tail) = block.all_mut().split_at(2).unwrap();
    head.into_write().unwrap().fill(0);
    tail.reborrow().into_part(1..2).unwrap().into_write().unwrap()[0] = 9;
    assert_eq!(tail.as_shared().read().unwrap(), [3, 9, 5]);
    assert_eq!(block.read().unwrap(), [0, 0, 3, 9, 5]);
}
