//! The allocator on CUDA, where any call of the driver fails.

use aquifer_tests::prelude::*;

use crate::support::{Gpu, MIB, standin};

/// One round of work.
fn work(gpu: &Gpu) -> Result<(), AllocError> {
    let allocator = Allocator::new(&gpu.device, Config::default())?;
    let (one, two) = (gpu.device.stream()?, gpu.device.stream()?);
    let block = allocator.alloc_bytes(5 * MIB, &one)?;
    one.fill(block.ptr(), 1, 5 * MIB)?;
    two.wait_for(&one.tick())?;
    block.record_stream(&two)?;
    drop(block);
    let small = allocator.alloc_bytes(1000, &two)?;
    let large = allocator.alloc_bytes(30 * MIB, &two)?;
    drop((small, large));
    two.synchronize()?;
    allocator.empty_cache()?;
    Ok(())
}

#[test]
fn every_driver_call_below_the_allocator_fails_once() {
    let standin = standin();
    let gpu = Gpu::new();
    work(&gpu).unwrap();
    let mut struck = 0;
    for nth in 1.. {
        standin.fail("any", nth, Code(999)).unwrap();
        let outcome = work(&gpu);
        if standin.clear_orders() > 0 {
            outcome.unwrap();
            break;
        }
        work(&gpu).unwrap_or_else(|error| panic!("after a failure of call {nth}: {error}"));
        gpu.device.settle();
        let info = gpu.device.memory_info().unwrap();
        assert_eq!(info.free, info.total, "memory leaked after a failure of call {nth}: {outcome:?}");
        struck = nth;
    }
    assert!(struck > 100, "{struck} calls");
    gpu.assert_no_violation();
}
