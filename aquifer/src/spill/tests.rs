//! Buffers that are spilled and come back with their contents.

use aquifer_allocator::Config;
use aquifer_device::{Code, Device, Operation};
use aquifer_kernels::Kernels;
use aquifer_sim::{Fault, SimConfig, SimDriver};
use proptest::prelude::*;

use super::*;
use crate::allocator::Allocator;
use crate::transfer::tests::assert_unused;

const MIB: u64 = 1 << 20;

struct Stand {
    driver: Arc<SimDriver>,
    device: Device,
    transfer: Transfer,
    stream: Stream,
    kernels: Kernels,
}

fn stand(mib: u64) -> Stand {
    stand_with(SimConfig::new(mib * MIB), Config::parse("quarantine_mb:0").unwrap())
}

fn stand_with(sim: SimConfig, config: Config) -> Stand {
    let driver = SimDriver::new(sim);
    let device = Device::new(driver.clone());
    let transfer = Transfer::new(&Allocator::new(&device, config).unwrap()).unwrap();
    let (stream, kernels) = (device.stream().unwrap(), transfer.allocator().kernels().unwrap());
    Stand { driver, device, transfer, stream, kernels }
}

impl Stand {
    /// A buffer of `mib` MiB of a value.
    fn filled(&self, mib: u64, value: u32) -> Buffer<u32> {
        let mut buffer =
            self.transfer.allocator().alloc(usize::try_from(mib * MIB / 4).unwrap(), &self.stream).unwrap();
        self.kernels.fill(&self.stream, &mut buffer, value).unwrap();
        buffer
    }

    fn holds(&self, spillable: &Spillable<u32>, value: u32) {
        let access = spillable.access(&self.stream).unwrap();
        let elements = access.to_vec(&self.transfer).unwrap();
        assert!(elements.iter().all(|&element| element == value), "{value}");
    }

    fn quiet(&self) {
        assert_eq!(self.device.driver().take_violation(), None);
    }
}

#[test]
fn under_pressure_the_least_recently_used_buffer_is_spilled() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffers: Vec<Spillable<u32>> = (0..4).map(|n| spiller.add(stand.filled(12, n), 0).unwrap()).collect();
    drop(buffers[0].access(&stand.stream).unwrap()); // used last
    let wanted = stand.transfer.allocator().alloc_bytes(20 * MIB, &stand.stream).unwrap();
    let there: Vec<bool> = buffers.iter().map(Spillable::is_on_device).collect();
    assert!(there[0] && !there[1], "{there:?}");
    drop(wanted);
    for (n, buffer) in (0..).zip(&buffers) {
        stand.holds(buffer, n);
    }
    let stats = spiller.stats();
    assert!(stats.spills >= 1 && stats.returns >= 1, "{stats:?}");
    assert_eq!(stats.device_bytes + stats.host_bytes, 48 * MIB);
    stand.quiet();
}

#[test]
fn lower_priorities_are_spilled_first() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let precious = spiller.add(stand.filled(20, 1), 10).unwrap();
    let cheap = spiller.add(stand.filled(20, 2), 0).unwrap(); // used later
    let _wanted = stand.transfer.allocator().alloc_bytes(30 * MIB, &stand.stream).unwrap();
    assert!(precious.is_on_device() && !cheap.is_on_device());
}

#[test]
fn buffers_in_use_or_with_other_handles_stay() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let (used, shared) = (stand.filled(20, 1), stand.filled(20, 2));
    let other = shared.share();
    let (used, shared) = (spiller.add(used, 0).unwrap(), spiller.add(shared, 0).unwrap());
    let access = used.access(&stand.stream).unwrap();
    let refused = stand.transfer.allocator().alloc_bytes(40 * MIB, &stand.stream);
    let report = refused.unwrap_err().report().unwrap().to_string();
    assert!(
        report.contains("\"spiller\", which freed 0 bytes: 2 buffers that could go to the host are in use"),
        "{report}"
    );
    assert!(used.is_on_device() && shared.is_on_device() && spiller.stats().spills == 0);
    drop((access, other));
    assert!(stand.transfer.allocator().alloc_bytes(40 * MIB, &stand.stream).is_ok());
    stand.holds(&used, 1);
    stand.holds(&shared, 2);
    stand.quiet();
}

#[test]
fn buffers_of_another_allocator_are_refused() {
    let stand = stand(64);
    let other = Allocator::new(stand.transfer.device(), Config::default()).unwrap();
    let theirs: Buffer<u8> = other.alloc(1000, &stand.stream).unwrap();
    let refused = Spiller::new(&stand.transfer, 0).unwrap().add(theirs, 0).unwrap_err();
    assert!(refused.to_string().contains("the buffer belongs to another allocator of"), "{refused}");
    stand.quiet();
}

/// The thread that brings a buffer back runs the reclaimer: it spills another and does not wait for
/// itself.
#[test]
fn a_returning_buffer_spills_another_without_a_deadlock() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffers: Vec<Spillable<u32>> = (0..3)
        .map(|n| spiller.add(stand.filled(40, n), 0).unwrap()) // each needs the place of the one before
        .collect();
    for round in 0..3 {
        for (n, buffer) in (0..).zip(&buffers) {
            stand.holds(buffer, n);
            assert_eq!(buffers.iter().filter(|buffer| buffer.is_on_device()).count(), 1, "round {round}");
        }
    }
    // Two at a time do not fit: an error, and both keep their contents.
    let first = buffers[0].access(&stand.stream).unwrap();
    assert!(buffers[1].access(&stand.stream).unwrap_err().is_out_of_memory());
    drop(first);
    stand.holds(&buffers[1], 1);
    stand.holds(&buffers[0], 0);
    stand.quiet();
}

#[test]
fn writes_during_an_access_are_kept() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffer = spiller.add(stand.filled(16, 1), 0).unwrap();
    for value in 2..6u32 {
        let mut access = buffer.access(&stand.stream).unwrap();
        stand.kernels.spin(&stand.stream, std::time::Duration::from_millis(5)).unwrap();
        stand.kernels.fill(&stand.stream, access.buffer_mut(), value).unwrap();
        drop(access); // not done by far
        assert!(buffer.spill().unwrap() >= 16 * MIB);
        assert!(!buffer.is_on_device() && buffer.spill().unwrap() == 0);
        stand.holds(&buffer, value);
    }
    stand.quiet();
}

/// Fragmented memory: freeing the requested bytes is not enough, and the last rung spills the rest.
#[test]
fn spilling_goes_on_after_memory_was_freed_in_pieces() {
    let stand = stand_with(SimConfig::new(64 * MIB), Config::parse("expandable_segments:False").unwrap());
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let mut order: Vec<(u64, Spillable<u32>)> = Vec::new();
    for n in 0..6u32 {
        order.push((u64::from(n), spiller.add(stand.filled(10, n), 0).unwrap()));
    }
    // Every other buffer is oldest, so that spilling leaves holes.
    for n in [1usize, 3, 5] {
        drop(order[n].1.access(&stand.stream).unwrap());
    }
    let large = stand.transfer.allocator().alloc_bytes(50 * MIB, &stand.stream).unwrap();
    assert!(order.iter().filter(|(_, buffer)| buffer.is_on_device()).count() <= 1);
    drop(large);
    for (n, buffer) in &order {
        stand.holds(buffer, u32::try_from(*n).unwrap());
    }
    stand.quiet();
}

#[test]
fn without_host_memory_no_buffer_is_spilled_or_lost() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffer = spiller.add(stand.filled(40, 3), 0).unwrap();
    stand.transfer.pinned().set_limit(Some(MIB));
    let refused = stand.transfer.allocator().alloc_bytes(40 * MIB, &stand.stream).unwrap_err().to_string();
    assert!(refused.contains("which freed 0 bytes: a buffer could not go to the host: "), "{refused}");
    let failures = spiller.stats().failures;
    assert!(failures > 0, "why spilling did not help");
    assert_eq!((spiller.spill(u64::MAX), spiller.stats().failures), (0, failures + 1));
    assert!(buffer.spill().unwrap_err().is_out_of_memory() && buffer.is_on_device());
    stand.transfer.pinned().set_limit(None);
    stand.holds(&buffer, 3);
    stand.quiet();
}

#[test]
fn failures_of_copies_lose_nothing() {
    for (operation, code) in [
        (Operation::CopyToHost, Code::OUT_OF_MEMORY),
        (Operation::CopyToDevice, Code::OUT_OF_MEMORY),
        (Operation::HostAlloc, Code::OUT_OF_MEMORY),
        (Operation::Record, Code::OUT_OF_MEMORY),
        (Operation::Wait, Code::OUT_OF_MEMORY),
    ] {
        for nth in 1..4 {
            let stand = stand(64);
            let spiller = Spiller::new(&stand.transfer, 0).unwrap();
            let buffers = [spiller.add(stand.filled(30, 1), 0).unwrap(), spiller.add(stand.filled(20, 2), 0).unwrap()];
            stand.driver.inject(Fault::Nth { operation: Some(operation), nth, code });
            for buffer in &buffers {
                let _ = buffer.spill();
                let _ = buffer.access(&stand.stream).map(drop);
            }
            drop(stand.transfer.allocator().alloc_bytes(40 * MIB, &stand.stream));
            stand.driver.clear_faults();
            stand.holds(&buffers[0], 1);
            stand.holds(&buffers[1], 2);
            stand.quiet();
        }
    }
}

#[test]
fn a_spiller_can_be_dropped_in_any_state() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffers: Vec<Spillable<u32>> = (0..3).map(|n| spiller.add(stand.filled(10, n), 0).unwrap()).collect();
    buffers[1].spill().unwrap();
    buffers[2].spill().unwrap();
    drop(buffers[2].access(&stand.stream).unwrap());
    drop(spiller); // spilling ends, and the buffers stay usable
    stand.holds(&buffers[1], 1);
    assert!(stand.transfer.allocator().alloc_bytes(60 * MIB, &stand.stream).is_err());
    std::mem::forget(buffers[0].access(&stand.stream).unwrap());
    drop(buffers);
    stand.device.synchronize().unwrap();
    // One access was forgotten, and with it its handle.
    assert_eq!(stand.transfer.allocator().memory_allocated(), 10 * MIB);
    assert_unused(&stand.transfer);
    stand.quiet();
}

#[test]
fn many_threads_share_less_memory_than_they_need() {
    let stand = stand(64);
    let spiller = Spiller::new(&stand.transfer, 0).unwrap();
    let buffers: Vec<Spillable<u32>> = (0..8).map(|n| spiller.add(stand.filled(12, n), 0).unwrap()).collect();
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (stand, buffers) = (&stand, &buffers);
            scope.spawn(move || {
                let stream = stand.device.stream().unwrap();
                for step in 0..12 {
                    let n = (thread * 5 + step * 3) % 8;
                    // Each holds one at a time, so that four of 12 MiB always fit.
                    let Ok(access) = buffers[n].access(&stream) else { continue };
                    let first = access.slice(0..=0).item(&stand.transfer).unwrap();
                    assert_eq!(first, u32::try_from(n).unwrap());
                }
            });
        }
    });
    for (n, buffer) in (0..).zip(&buffers) {
        stand.holds(buffer, n);
    }
    stand.quiet();
}

#[derive(Clone, Debug)]
enum Step {
    Add(u64, i32),
    Write(usize, u32),
    Read(usize),
    Spill(usize),
    Drop(usize),
    Alloc(u64),
    Free,
    Hold(usize),
    Release,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u64..24, 0i32..3).prop_map(|(mib, priority)| Step::Add(mib, priority)),
        (any::<usize>(), any::<u32>()).prop_map(|(n, value)| Step::Write(n, value)),
        any::<usize>().prop_map(Step::Read),
        any::<usize>().prop_map(Step::Spill),
        any::<usize>().prop_map(Step::Drop),
        (1u64..40).prop_map(Step::Alloc),
        Just(Step::Free),
        any::<usize>().prop_map(Step::Hold),
        Just(Step::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Contents stay through any use, spilling and dropping on a device that is too small for all
    /// buffers.
    #[test]
    fn random_programs_keep_contents(steps in prop::collection::vec(step(), 1..30), seed in 0u64..1000, segments in any::<bool>()) {
        let config = if segments { Config::parse("expandable_segments:False").unwrap() } else { Config::default() };
        let stand = stand_with(SimConfig::new(64 * MIB).seed(seed), config);
        let spiller = Spiller::new(&stand.transfer, 0).unwrap();
        let mut model: Vec<(Arc<Spillable<u32>>, u32)> = Vec::new();
        let mut allocated = Vec::new();
        let mut held: Vec<Buffer<u32>> = Vec::new();
        let at = |n: usize, model: &[(Arc<Spillable<u32>>, u32)]| n % model.len().max(1);
        for step in steps {
            match step {
                Step::Add(mib, priority) => {
                    let Ok(mut buffer) = stand.transfer.allocator().alloc(usize::try_from(mib * MIB / 4).unwrap(), &stand.stream) else { continue };
                    let value = u32::try_from(model.len()).unwrap();
                    stand.kernels.fill(&stand.stream, &mut buffer, value).unwrap();
                    model.push((Arc::new(spiller.add(buffer, priority).unwrap()), value));
                }
                Step::Write(n, value) if !model.is_empty() => {
                    let n = at(n, &model);
                    let (spillable, expected) = &mut model[n];
                    let Ok(mut access) = spillable.access(&stand.stream) else { continue };
                    stand.kernels.fill(&stand.stream, access.buffer_mut(), value).unwrap();
                    *expected = value;
                }
                Step::Read(n) if !model.is_empty() => {
                    let (spillable, expected) = &model[at(n, &model)];
                    let Ok(access) = spillable.access(&stand.stream) else { continue };
                    prop_assert_eq!(access.slice(access.len() - 1..).item(&stand.transfer).unwrap(), *expected);
                }
                Step::Spill(n) if !model.is_empty() => drop(model[at(n, &model)].0.spill().unwrap()),
                Step::Drop(n) if !model.is_empty() => drop(model.remove(at(n, &model))),
                Step::Alloc(mib) => allocated.extend(stand.transfer.allocator().alloc_bytes(mib * MIB, &stand.stream)),
                Step::Free => drop(allocated.pop()),
                Step::Hold(n) if !model.is_empty() => {
                    let Ok(access) = model[at(n, &model)].0.access(&stand.stream) else { continue };
                    held.push(access.share()); // a handle that outlives the access
                }
                Step::Release => drop(held.pop()),
                _ => {}
            }
        }
        drop((allocated, held));
        for (spillable, expected) in &model {
            stand.holds(spillable, *expected);
        }
        drop(model);
        stand.device.synchronize().unwrap();
        prop_assert_eq!(stand.transfer.allocator().memory_allocated(), 0);
        assert_unused(&stand.transfer);
        stand.quiet();
    }
}
