//! The allocator on CUDA, where any call of the driver fails.

use std::time::Instant;

use aquifer_standin::{OTHER_PID, RESERVED, in_process};
use aquifer_tests::prelude::*;

use crate::support::{Gpu, MIB, standin};

/// One round of work.
fn work(gpu: &Gpu) -> Result<(), aquifer::Error> {
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

/// The first refusal asks NVML, which then serves for a second.
#[test]
fn refusals_name_processes_and_seldom_ask_for_them() {
    let variables = [("AQUIFER_NVML_LIBRARY", standin().path().to_str().unwrap())];
    in_process(&variables, || {
        let gpu = Gpu::new();
        let allocator = Allocator::new(&gpu.device, Config::default()).unwrap();
        gpu.device.alloc(50 * MIB).unwrap();
        gpu.standin.set_other_process_bytes(500 * MIB);
        let refuse = || match allocator.alloc_bytes(600 * MIB, gpu.device.default_stream()) {
            Err(AllocError::OutOfMemory(report)) => report,
            other => panic!("{other:?}"),
        };
        let start = Instant::now();
        let report = refuse();
        let who = format!(
            "50.00 MiB is held by the rest of this process (context, modules, libraries), 500.00 MiB by process \
             {OTHER_PID}. "
        );
        assert!(report.to_string().contains(&who), "{report}");
        assert_eq!(report.attribution.as_ref().unwrap().driver, Some(RESERVED));
        for _ in 0..50 {
            assert_eq!(refuse().attribution, report.attribution);
        }
        let asked = gpu.standin.calls("nvmlDeviceGetMemoryInfo_v2").unwrap();
        assert!(asked <= 1 + start.elapsed().as_secs(), "{asked}");
        gpu.standin.set_other_process_bytes(0);
        assert!(allocator.attribution().unwrap().other_processes.is_empty(), "asked at once");
        assert_eq!(allocator.attribution().unwrap().suggested_headroom, 50 * MIB);
        allocator.set_limit(Some(10 * MIB));
        assert_eq!(
            refuse().attribution.as_ref().unwrap().rest_of_process,
            None,
            "a limit has nothing to do with processes"
        );
    });
}
