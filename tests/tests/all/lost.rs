//! Errors of a lost device name the call that first reported the loss, on every driver.

use aquifer::Error;
use aquifer::transfer::Transfer;
use aquifer_tests::prelude::*;

const MIB: u64 = 1 << 20;

#[test]
fn every_error_after_the_first_names_the_first() {
    let subject = Subject::new(1 << 30);
    let device = subject.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let transfer = Transfer::new(&allocator).unwrap();
    let (stream, memory) = (device.stream().unwrap(), device.alloc(MIB).unwrap());
    subject.inject(Fault::LostAt { nth: 1 });
    assert_eq!(device.lost(), None);
    let first = stream.fill(memory, 1, MIB).unwrap_err();
    assert_eq!((first.operation, device.lost().as_ref()), (Operation::Memset, Some(&first)));
    assert!(!first.to_string().contains("before"), "{first}");

    let named = format!("{} was lost before: cuMemsetD8Async reported {}", device.label(), first.code.name());
    let synchronized = device.synchronize().unwrap_err();
    assert!(synchronized.is_device_lost() && synchronized.to_string().ends_with(&named), "{synchronized}");
    let allocated = allocator.alloc_bytes(100 * MIB, &stream).unwrap_err();
    assert!(matches!(&allocated, AllocError::Device(error) if error.is_device_lost()), "{allocated}");
    assert!(allocated.to_string().ends_with(&named), "{allocated}");
    let pinned = Error::from(transfer.pinned().alloc::<u8>(32 << 20).unwrap_err());
    assert!(matches!(&pinned, Error::Device(_)) && pinned.to_string().ends_with(&named), "{pinned}");
    // The loss kept this stream's last event from being recorded.
    let tick = stream.tick();
    drop(stream);
    let uncovered = tick.cover().unwrap_err();
    assert!(uncovered.is_device_lost() && uncovered.to_string().ends_with(&named), "{uncovered}");
    assert_eq!(device.lost(), Some(first));
}

#[test]
fn cached_memory_of_a_lost_device_is_refused_and_may_be_freed() {
    for options in ["", "backing:segments"] {
        let subject = Subject::new(1 << 30);
        let device = subject.device();
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let (pool, stream) = (allocator.create_pool(PoolOptions::default()).unwrap(), device.stream().unwrap());
        let (kept, raw) = (allocator.alloc_bytes(MIB, &stream).unwrap(), allocator.alloc_raw(MIB, &stream).unwrap());
        let alloc = || {
            let handles = [allocator.alloc_bytes(MIB, &stream), allocator.alloc_aligned(MIB, 1 << 20, &stream)];
            let pooled = [pool.alloc_bytes(MIB, &stream), pool.alloc_bytes_zeroed(MIB, &stream)];
            let pointer = allocator.alloc_raw(MIB, &stream).and_then(|ptr| allocator.free_raw(ptr));
            let pinned = transfer.pinned().alloc::<u8>(1000).map(drop).map_err(Error::from);
            let device = handles.into_iter().chain(pooled).map(|one| one.map(drop)).chain([pointer]);
            device.map(|one| one.map_err(Error::from)).chain([pinned]).collect::<Vec<_>>()
        };
        assert!(alloc().iter().all(Result::is_ok));
        let other = Allocator::new(&device, Config::default()).unwrap();
        drop(other.alloc_bytes(MIB, &stream).unwrap());
        subject.inject(Fault::LostAt { nth: 1 });
        let first = stream.fill(kept.ptr(), 1, MIB).unwrap_err();
        let named = format!("{} was lost before: cuMemsetD8Async reported {}", device.label(), first.code.name());
        for refused in alloc() {
            let error = refused.unwrap_err();
            assert!(matches!(&error, Error::Device(error) if error.is_device_lost()), "{error}");
            assert!(error.to_string().ends_with(&named), "{error}");
        }
        other.alloc_bytes(MIB, &stream).unwrap_err();
        drop(kept);
        allocator.free_raw(raw).unwrap();
        assert_eq!(allocator.memory_allocated(), 0);
        // The next allocator may have the state of this one.
        drop((pool, transfer, allocator, other));
        let next = Subject::new(1 << 30).device();
        let allocator = Allocator::new(&next, Config::default()).unwrap();
        for _ in 0..2 {
            drop(allocator.alloc_bytes(MIB, next.default_stream()).unwrap());
        }
    }
}

#[test]
fn an_error_that_does_not_lose_the_device_is_no_first_cause() {
    let subject = Subject::new(1 << 30);
    let device = subject.device();
    assert!(device.alloc(u64::MAX / 2).unwrap_err().is_out_of_memory());
    device.free(DevicePtr(512)).unwrap_err();
    assert_eq!(device.lost(), None);
}

/// A call of one device reports the loss of another. Real drivers refuse such calls, and so does
/// the stand-in.
#[test]
fn a_loss_that_a_peer_reports_first_is_attributed_to_the_right_device() {
    if !Subject::is_simulated() {
        return;
    }
    let [one, two] = [0, 1].map(|ordinal| Subject::open(&SimConfig::new(1 << 30).ordinal(ordinal)).device());
    let (from, to) = (one.stream().unwrap(), two.stream().unwrap());
    let memory = one.alloc(MIB).unwrap();
    from.fill(memory, 1, 2 * MIB).unwrap();
    let error = to.wait_for(&from.tick()).unwrap_err();
    assert_eq!((error.operation, error.is_device_lost()), (Operation::Wait, true), "{error}");
    assert!(error.to_string().ends_with(&format!("{} is lost", one.label())), "{error}");
    assert_eq!((one.lost(), two.lost()), (Some(error), None));
    let later = one.synchronize().unwrap_err();
    assert!(
        later.to_string().ends_with("was lost before: cuStreamWaitEvent reported CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{later}"
    );
    to.fill(two.alloc(MIB).unwrap(), 1, MIB).unwrap();
    two.synchronize().unwrap();
}

#[test]
fn errors_name_the_device_whose_call_failed() {
    let devices = [0, 1].map(|ordinal| Subject::open(&SimConfig::new(1 << 30).ordinal(ordinal)).device());
    for device in &devices {
        let refused = device.alloc(2 << 30).unwrap_err();
        assert_eq!(refused.device.as_ref(), Some(&device.label()));
        let text = format!("cuMemAlloc failed on {}: CUDA_ERROR_OUT_OF_MEMORY (2)", device.label().spec());
        assert!(refused.to_string().starts_with(&text), "{refused}");
        let foreign = device.free(DevicePtr(512)).unwrap_err();
        assert_eq!(foreign.device, refused.device, "{foreign}");
    }
}
