//! Memory that only threads of the runtime still hold. This is a test binary of its own because any
//! allocator that is made or dropped in the process releases such memory, too.

use std::time::Duration;

use aquifer::Allocator;
use aquifer::transfer::Transfer;
use aquifer_allocator::Config;
use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;

#[test]
fn the_last_memory_of_a_transfer_in_flight_goes_back_to_the_device() {
    for cancelled in [false, true] {
        let sim = SimDriver::new(SimConfig::new(1 << 30));
        {
            let device = Device::new(sim.clone());
            let allocator = Allocator::new(&device, Config::default()).unwrap();
            let transfer = Transfer::new(&allocator).unwrap();
            let stream = device.stream().unwrap();
            drop(allocator.alloc_bytes(100 * MIB, &stream).unwrap());
            let mut buffer = allocator.alloc::<u8>(32 << 20, &stream).unwrap();
            let pending = buffer.upload(vec![1; 32 << 20], &transfer).unwrap().map(|()| buffer);
            if cancelled {
                pending.cancel();
            }
        }
        let held = || sim.held_bytes();
        // Usually one look is enough.
        (0..1000).take_while(|_| held() > 0).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
        assert_eq!(held(), 0, "cancelled: {cancelled}");
    }
}

/// The runtime of buffers, with its pinned memory, streams and kernels, is kept for the
/// allocator, which the last buffer closes.
#[test]
fn what_is_kept_for_buffers_goes_back_with_the_last_handle_of_the_device() {
    let sim = SimDriver::new(SimConfig::new(1 << 30));
    let device = Device::new(sim.clone());
    let stream = device.stream().unwrap();
    let memory = Allocator::new(&device, Config::default()).unwrap();
    let buffer = memory.from_slice(&vec![1_u8; 32 << 20], &stream).unwrap();
    assert_eq!(buffer.to_vec(&stream).unwrap().len(), 32 << 20);
    drop((memory, stream));
    let calls = sim.calls_made();
    drop(buffer);
    assert_eq!(sim.calls_made(), calls, "dropping a buffer calls no driver");
    drop(device);
    // Threads of the runtime end soon.
    let left =
        || (sim.held_bytes(), sim.live_objects().host, sim.live_objects().modules, sim.live_objects().streams > 1);
    (0..1000).take_while(|_| left() != (0, 0, 0, false)).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
    assert_eq!(left(), (0, 0, 0, false));
}
