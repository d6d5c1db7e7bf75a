//! The allocator on CUDA: what it does on a simulated device it does here.

use aquifer::Allocator;
use aquifer::device::ErrorKind;
use aquifer::memory::{AllocError, Config};

use crate::support::{Gpu, MIB, standin};

fn allocator(gpu: &Gpu, options: &str) -> Allocator {
    Allocator::new(&gpu.device, Config::parse(options).unwrap()).unwrap()
}

#[test]
fn both_backings_serve_reuse_and_give_back() {
    for options in ["backing:paged", "backing:segments"] {
        let gpu = Gpu::new();
        let allocator = allocator(&gpu, options);
        let (one, two) = (gpu.device.stream().unwrap(), gpu.device.stream().unwrap());
        for round in 0..20_u64 {
            let sizes = [512, 70_000, MIB, 3 * MIB, 25 * MIB + round * 4096];
            let blocks: Vec<_> = sizes.iter().map(|&size| allocator.alloc_bytes(size, &one).unwrap()).collect();
            for block in &blocks {
                one.fill(block.ptr(), u8::try_from(round).unwrap(), block.bytes()).unwrap();
            }
            two.wait_for(&one.tick()).unwrap();
            let mut found = [0; 512];
            two.download_blocking(&mut found, blocks[3].ptr()).unwrap();
            assert_eq!(found, [u8::try_from(round).unwrap(); 512]);
            blocks[3].record_stream(&two).unwrap();
        }
        assert!(allocator.memory_reserved() >= 25 * MIB);
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 0, "{options}");
        drop(allocator);
        let info = gpu.device.memory_info().unwrap();
        assert_eq!(info.free, info.total, "{options}");
        gpu.assert_no_violation();
    }
}

#[test]
fn running_out_of_memory_is_a_report() {
    let gpu = Gpu::new();
    let allocator = allocator(&gpu, "");
    let stream = gpu.device.stream().unwrap();
    let held = allocator.alloc_bytes(900 * MIB, &stream).unwrap();
    let error = allocator.alloc_bytes(200 * MIB, &stream).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
    drop(held);
    drop(allocator.alloc_bytes(200 * MIB, &stream).unwrap());
    gpu.assert_no_violation();
}

#[test]
fn a_device_that_is_lost_says_so_to_everybody() {
    let gpu = Gpu::new();
    let allocator = allocator(&gpu, "");
    let stream = gpu.device.stream().unwrap();
    let block = allocator.alloc_bytes(MIB, &stream).unwrap();
    gpu.standin.inject("lost_at=1").unwrap();
    let lost = stream.fill(block.ptr(), 1, MIB).unwrap_err();
    assert_eq!(lost.kind, ErrorKind::DeviceLost);
    let error = allocator.alloc_bytes(100 * MIB, &stream).unwrap_err();
    assert!(matches!(&error, AllocError::Device(error) if error.is_device_lost()), "{error}");
    drop((block, stream, allocator));
}

/// What one round of work comes to, whatever fails in it.
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
        standin.fail("any", nth, aquifer_device::Code(999)).unwrap();
        let outcome = work(&gpu);
        let left = standin.clear_orders();
        if left > 0 {
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
