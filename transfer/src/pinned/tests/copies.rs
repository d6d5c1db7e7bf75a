//! Buffers while copies use them.

use aquifer_device::RequestError;

use super::*;

#[test]
fn uploaded_bytes_are_downloaded_again() {
    let bench = Bench::new();
    let down = bench.device.stream().unwrap();
    let values: Vec<u8> = (0..=255).collect();
    let source = bench.pool.alloc_from(&values).unwrap();
    let mut target = bench.pool.alloc_zeroed::<u8>(256).unwrap();
    bench.upload(&source).unwrap();
    down.wait_for(&bench.stream.tick()).unwrap();
    download(target.as_slice_mut().host(), bench.memory, &down, &bench.device).unwrap();
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
    let bench = Bench::new();
    let buffer = bench.pool.alloc::<u8>(1 << 20).unwrap();
    let first = address(&buffer);
    drop(buffer);
    let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_eq!(address(&buffer), first, "idle memory is reused");
    bench.upload(&buffer).unwrap();
    assert_eq!(bench.calls_in(|| drop(buffer)).total(), 0, "dropping makes no driver call");
    let other = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_ne!(address(&other), first, "a copy is in flight");
    bench.stream.synchronize().unwrap();
    let again = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_eq!(address(&again), first, "the copy is done");
    drop((other, again));
    bench.check_over();
}

#[test]
fn a_cached_request_and_its_drop_make_no_driver_call() {
    let bench = Bench::new();
    drop(bench.pool.alloc::<u8>(100_000).unwrap());
    let calls = bench.calls_in(|| (0..100).for_each(|_| drop(bench.pool.alloc::<u8>(100_000).unwrap())));
    assert_eq!(calls.total(), 0);
    bench.check_over();
}

#[test]
fn writing_waits_for_uploads_and_reading_does_not() {
    let bench = Bench::new();
    let mut buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
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
    let bench = Bench::new();
    let streams: Vec<_> = (0..3).map(|_| bench.device.stream().unwrap()).collect();
    let mut buffer = bench.pool.alloc_from(&vec![3_u8; 1 << 20]).unwrap();
    for (place, stream) in streams.iter().enumerate() {
        let to = bench.memory.offset((1 + place as u64) << 20);
        upload(buffer.as_slice().host(), to, stream, &bench.device).unwrap();
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
    let bench = Bench::new();
    let other = bench.device.stream().unwrap();
    let [quick, slow, slower] = [(); 3].map(|()| bench.pool.alloc_zeroed::<u8>(16 << 20).unwrap());
    let (here, there) = (bench.memory, bench.memory.offset(32 << 20));
    upload(quick.try_slice(0..1).unwrap().host(), there, &other, &bench.device).unwrap();
    for _ in 0..50 {
        upload(slow.as_slice().host(), here, &bench.stream, &bench.device).unwrap();
        upload(slower.as_slice().host(), there, &other, &bench.device).unwrap();
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
    let (bench, other) = (Bench::new(), Bench::new());
    let buffer = bench.pool.alloc::<u8>(10).unwrap();
    let part = buffer.as_slice().host();
    let wrong = part.memory.access(&other.stream, AccessKind::Read).unwrap_err();
    assert!(matches!(wrong, TransferError::Request(RequestError::WrongDevice { .. })), "{wrong}");
    let capture = bench.stream.begin_capture().unwrap();
    let refused = part.memory.access(&bench.stream, AccessKind::Read).unwrap_err();
    assert!(refused.to_string().contains("capture"), "{refused}");
    drop(capture);
    part.memory.access(&bench.stream, AccessKind::Read).map(drop).unwrap();
}

/// No bytes, bytes that start anywhere, and elements of any alignment.
#[test]
fn lengths_and_alignments() {
    #[derive(Clone, Copy)]
    #[repr(C, align(8192))]
    struct Aligned([u8; 8192]);
    #[allow(unsafe_code, reason = "a plain type of unusual alignment")]
    // SAFETY: bytes without padding, all of which may have any value.
    unsafe impl bytemuck::Zeroable for Aligned {}
    #[allow(unsafe_code, reason = "a plain type of unusual alignment")]
    // SAFETY: bytes without padding, all of which may have any value.
    unsafe impl Pod for Aligned {}

    let pool = Bench::new().pool;
    let mut empty = pool.alloc::<u64>(0).unwrap();
    assert!(empty.is_empty() && empty.read().unwrap().is_empty() && empty.write().unwrap().is_empty());
    assert_eq!(pool.alloc::<()>(1_000).unwrap().read().unwrap().len(), 1_000);
    let small = pool.alloc::<u8>(1).unwrap();
    let mut aligned = pool.alloc_zeroed::<Aligned>(3).unwrap();
    assert!(aligned.as_slice().ptr().0.is_multiple_of(8192));
    aligned.write().unwrap()[2].0[8191] = 1;
    assert_eq!(aligned.slice(2..).as_bytes().slice(8191..).read().unwrap(), [1]);
    let error = pool.alloc::<u64>(usize::MAX / 4).unwrap_err();
    assert!(matches!(error, TransferError::Request(RequestError::LengthOverflow { size: 8, .. })), "{error}");
    let error = pool.alloc::<u8>(1 << 62).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop((small, aligned, empty));
    assert_eq!(pool.stats().active_bytes.current, 0);
}

#[test]
fn views_stay_inside_and_casts_are_checked() {
    let pool = Bench::new().pool;
    let mut buffer = pool.alloc_from(&[1_u16, 2, 3, 4, 5]).unwrap();
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = buffer.try_slice(3..2);
    for refused in [buffer.try_slice(2..6), buffer.try_slice(..=5), reversed, buffer.try_slice(6..)] {
        assert!(matches!(refused.unwrap_err(), TransferError::Request(RequestError::OutOfBounds { len: 5, .. })));
    }
    assert!(buffer.as_slice_mut().split_at(6).is_err());
    assert!(buffer.as_slice().cast::<u32>().is_err(), "10 bytes are no whole number of u32");
    assert!(buffer.slice(1..).cast::<u32>().is_err(), "not aligned");
    assert!(buffer.slice(1..).cast::<()>().is_err());
    assert_eq!(buffer.slice(2..4).cast::<[u16; 2]>().unwrap().read().unwrap(), [[3, 4]]);
    buffer.slice_mut(..2).cast::<u32>().unwrap().write().unwrap()[0] = 0;
    assert_eq!(buffer.read().unwrap(), [0, 0, 3, 4, 5]);
    assert_eq!(buffer.as_slice_mut().into_bytes().bytes(), 10);
    let (mut head, mut tail) = buffer.as_slice_mut().split_at(2).unwrap();
    head.write().unwrap().fill(7);
    tail.reborrow().into_slice(1..2).unwrap().into_write().unwrap()[0] = 9;
    assert_eq!(tail.as_shared().read().unwrap(), [3, 9, 5]);
    assert_eq!(buffer.read().unwrap(), [7, 7, 3, 9, 5]);
}
