//! The end of an allocator and its device. A test program of its own, because what is left to do is
//! done by whoever makes the next allocator in the process.

use aquifer::Allocator;
use aquifer::memory::Config;

use aquifer_tests::{Bench, GIB, MIB, Subject, write_on};

#[test]
fn item_25_any_order_of_teardown() {
    for options in ["", "backing:segments"] {
        let driver = Subject::new(GIB);
        let device = driver.device();
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let held = [1, 30].map(|mib| allocator.alloc_bytes(mib * MIB, device.default_stream()).unwrap());
        write_on(device.default_stream(), held[1].ptr(), 30 * MIB);
        drop(allocator);
        drop(device);
        let calls = driver.calls_made();
        std::thread::spawn(move || drop(held)).join().unwrap();
        assert_eq!(driver.calls_made(), calls, "dropping a handle made a driver call");
        // Closing the device is left to the next allocator of the process.
        drop(Bench::new(64 * MIB, ""));
        assert_eq!(driver.free(), driver.memory_info().unwrap().total);
        driver.assert_no_violation();
    }
}
