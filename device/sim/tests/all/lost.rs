//! What errors of a lost device tell: the work that failed, from the first one on, and which error
//! was the first.

use aquifer_device::{AccessKind, Code, Device, DeviceError, DevicePtr, Driver, Operation};
use aquifer_sim::{SimConfig, SimDriver};

use crate::common::{MIB, Short, device};

/// The text of the error that a lost device gives, which every call gives alike.
fn loss(driver: &SimDriver) -> String {
    let text = |error: DeviceError| error.detail.unwrap_or_default().into_string();
    let first = text(driver.synchronize().unwrap_err());
    assert_eq!(text(driver.memory_info().unwrap_err()), first);
    first
}

#[test]
fn work_outside_of_any_memory_is_named_with_its_stream_and_address() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    driver.memset(memory, 1, 2 * MIB, stream).unwrap();
    let (found, text) = (driver.take_violation().unwrap(), loss(&driver));
    assert_eq!(text, format!("the simulated device is lost: {found}"));
    let end = memory.offset(MIB);
    for part in ["'memset #1' on stream 1", &end.to_string(), "(1048576 bytes)", "nothing is allocated"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn work_on_freed_memory_is_named_with_the_call_that_freed_it() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    driver.free(memory).unwrap();
    driver.kernel("axpy", &[(memory, MIB, AccessKind::Write)], None, stream).unwrap();
    let text = loss(&driver);
    assert!(text.contains("'kernel axpy #") && text.contains("was taken away by 'cuMemFree #"), "{text}");
}

#[test]
fn a_kernel_that_breaks_its_declaration_is_named() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    let declared = [(memory, 512, AccessKind::Write)];
    let kernel = move |device: &mut dyn aquifer_device::KernelMemory| device.write(memory.offset(512), &[1]);
    driver.kernel("stray", &declared, Some(std::sync::Arc::new(move |device, _| kernel(device))), stream).unwrap();
    let text = loss(&driver);
    assert!(text.contains("undeclared access at ") && text.contains("\n  by: 'kernel stray #1' on stream 1"), "{text}");
}

#[test]
fn a_copy_of_nothing_on_a_peer_names_the_peer() {
    let one = device(0);
    let two = SimDriver::new(SimConfig::new(1 << 30).ordinal(1));
    let (stream, memory) = (two.stream(), two.alloc(MIB).unwrap());
    two.copy_peer(memory, &*one, DevicePtr(one.alloc(MIB).unwrap().0 + MIB), 64, stream).unwrap();
    let text = loss(&two);
    assert!(text.contains("'copy from a peer #1'") && text.contains("on the peer, sim:0 (Simulated H100"), "{text}");
}

#[test]
fn later_errors_name_the_call_that_reported_the_loss_first() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).ordinal(4)));
    let (stream, memory) = (device.stream().unwrap(), device.alloc(MIB).unwrap());
    stream.fill(memory, 1, 2 * MIB).unwrap();
    assert_eq!(device.lost(), None, "no call has reported it yet");
    let first = stream.synchronize().unwrap_err();
    assert_eq!(device.lost().as_ref(), Some(&first));
    assert_eq!((first.operation, first.code), (Operation::SynchronizeStream, Code::ILLEGAL_ADDRESS));
    assert!(!first.to_string().contains("before"), "{first}");
    for later in [device.alloc(MIB).unwrap_err(), stream.fill(memory, 1, 8).unwrap_err()] {
        let named =
            "; sim:4 (Simulated H100 1 GiB) was lost before: cuStreamSynchronize reported CUDA_ERROR_ILLEGAL_ADDRESS";
        assert!(later.to_string().ends_with(named), "{later}");
        assert!(later.to_string().contains("'memset #1' on stream 1"), "{later}");
    }
    assert_eq!(device.lost(), Some(first));
}

#[test]
fn the_loss_of_a_device_is_noted_when_host_memory_is_given_back() {
    for registered in [false, true] {
        let device = Device::new(device(0));
        let (memory, mut own) = (device.alloc(MIB).unwrap(), vec![0_u8; 4096]);
        let host = if registered {
            // SAFETY: the memory is there until the end of the test, and nothing copies.
            unsafe { device.driver().host_register(own.as_mut_ptr(), own.len()).unwrap() }
        } else {
            device.driver().host_alloc(4096).unwrap()
        };
        device.default_stream().fill(memory, 1, 2 * MIB).unwrap();
        assert_eq!(device.lost(), None, "the work failed, and no call has reported it yet");
        let given = if registered {
            // SAFETY: nothing uses the memory.
            unsafe { device.driver().host_unregister(host) }
        } else {
            // SAFETY: nothing uses the memory.
            unsafe { device.driver().host_free(host) }
        };
        assert_eq!(device.lost(), given.err());
        assert!(device.lost().is_some());
    }
}
