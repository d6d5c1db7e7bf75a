//! Children that a process forks after it has opened a device: no device works there, every request
//! says so, and nothing hangs, even if other threads held locks. A test program of its own,
//! because it forks.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use aquifer::device::cuda;
use aquifer::device::sim::SimDriver;
use aquifer::transfer::Transfer;
use aquifer_tests::prelude::*;

const MIB: u64 = 1 << 20;
/// Longer than any child takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Forks, runs `body` in the child, and panics here if that panics, or does not end. The child then
/// leaves at once, or as programs do (`exits`).
fn in_child(name: &str, exits: bool, body: impl FnOnce()) {
    // SAFETY: the child runs nothing but the body, which is what is tested, and leaves.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{name}: cannot fork");
    if child == 0 {
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let code = i32::from(outcome.is_err());
        if exits {
            std::process::exit(code);
        }
        // SAFETY: leaves without running anything.
        unsafe { libc::_exit(code) };
    }
    let begun = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: the number outlives the call.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if ended == child {
            break;
        }
        if begun.elapsed() > PATIENCE {
            // SAFETY: our own child, which was not waited for yet.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("{name}: the child hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{name}: the child failed: {status:#x}");
}

/// The name of a device, the device, and what must outlive it.
type Named = (&'static str, Device, Option<Box<dyn Any>>);

/// The devices that a test uses.
fn devices() -> Vec<Named> {
    let simulated = Device::new(SimDriver::new(SimConfig::new(512 * MIB)));
    let mut devices: Vec<Named> = vec![("sim", simulated, None)];
    if cfg!(target_os = "linux") {
        let standin = aquifer_standin::load().unwrap_or_else(|error| panic!("{error}"));
        let standin = standin.add_device("512MiB").unwrap_or_else(|error| panic!("{error}"));
        let device = cuda::shared(standin.ordinal()).unwrap();
        devices.push(("standin", device, Some(Box::new(standin))));
    }
    devices
}

fn refused<T, E: Display>(what: &str, outcome: Result<T, E>) {
    let error = outcome.err().unwrap_or_else(|| panic!("{what} succeeds in the child"));
    assert!(error.to_string().contains("forked"), "{what}: {error}");
}

/// What a program has when it forks.
struct Handles {
    device: Device,
    allocator: Allocator,
    streams: [Stream; 3],
    transfer: Transfer,
}

impl Handles {
    fn new(device: Device, options: &str) -> Handles {
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let streams = [(); 3].map(|()| device.stream().unwrap());
        let transfer = Transfer::new(&allocator).unwrap();
        transfer.allocator().kernels().unwrap();
        // So that the next one is a hit.
        for stream in &streams {
            drop(allocator.alloc_bytes(MIB, stream).unwrap());
        }
        Handles { device, allocator, streams, transfer }
    }

    /// Makes every kind of request.
    fn all_is_refused(&self) {
        let Handles { device, allocator, streams: [one, two, _], transfer } = self;
        refused("a hit", allocator.alloc_bytes(MIB, one));
        refused("no memory", allocator.alloc_bytes(0, one));
        refused("a miss", allocator.alloc_bytes(100 * MIB, one));
        refused("a buffer", allocator.alloc::<f32>(100, two));
        refused("empty_cache", allocator.empty_cache());
        refused("trim_to", allocator.trim_to(MIB));
        refused("another allocator", Allocator::new(device, Config::default()));
        refused("growable", allocator.growable(64 * MIB, one));
        assert_eq!(device.alloc(MIB).unwrap_err().kind, ErrorKind::Forked);
        refused("memory_info", device.memory_info());
        refused("synchronize", device.synchronize());
        refused("create_stream", device.stream());
        refused("create_event", device.create_event(false));
        refused("fill", one.fill(DevicePtr(1 << 40), 1, 512));
        refused("stream.synchronize", one.synchronize());
        refused("is_idle", one.is_idle());
        refused("wait_for", one.wait_for(&two.tick()));
        refused("cover", one.tick().cover());
        refused("is_done", one.tick().is_done());
        refused("tick.synchronize", one.tick().synchronize());
        refused("begin_capture", one.begin_capture());
        refused("pinned", transfer.pinned().alloc::<u8>(4096));
        refused("another runtime", Transfer::new(allocator));
        device.settle();
        device.settle_unused();
    }
}

#[test]
fn every_request_in_a_forked_child_says_that_it_is_one() {
    for options in ["", "backing:segments"] {
        for (name, device, kept) in devices() {
            let handles = Handles::new(device, options);
            let [one, two, three] = &handles.streams;
            let block = handles.allocator.alloc_bytes(3 * MIB, one).unwrap();
            let shared = handles.allocator.alloc_bytes(3 * MIB, one).unwrap();
            shared.record_stream(two).unwrap();
            let pool = handles.allocator.create_pool(PoolOptions::default()).unwrap();
            let growable = handles.allocator.growable(64 * MIB, one).ok();
            let event = handles.device.create_event(false).unwrap();
            event.record(one).unwrap();
            let pinned = handles.transfer.pinned().alloc::<u8>(1 << 20).unwrap();
            let graph = two.begin_capture().unwrap().end().unwrap();
            let capture = three.begin_capture().unwrap();
            let tick = one.tick();
            let expected = one.expect_work();
            in_child(name, false, || {
                handles.all_is_refused();
                refused("record", event.record(one));
                refused("is_complete", event.is_complete());
                refused("end", capture.end());
                refused("launch", graph.launch(one));
                refused("record_stream", block.record_stream(two));
                if cfg!(target_os = "linux") {
                    refused("open", cuda::shared(0));
                }
                let error = aquifer::open("sim:1GiB").unwrap_err();
                assert!(error.to_string().contains("forked"), "{error}");
            });
            drop(expected);
            let mut held: Vec<Box<dyn Any>> = Vec::new();
            held.push(Box::new((block, shared, growable)));
            held.push(Box::new((capture, graph, event, pool, pinned, tick)));
            held.push(Box::new(handles));
            // Dropped in the child, and not in the parent before the child is gone.
            in_child(name, true, || drop(std::mem::take(&mut held)));
            drop(held);
            drop(kept);
        }
    }
}

/// Other threads are in the middle of everything while the process forks.
#[test]
fn no_lock_that_a_thread_held_at_the_fork_hangs_the_child() {
    for (name, device, kept) in devices() {
        let handles = Handles::new(device, "");
        let stop = AtomicBool::new(false);
        let keep_going = |work: &(dyn Fn() + Sync)| {
            while !stop.load(Ordering::Relaxed) {
                work();
            }
        };
        let Handles { device, allocator, streams: [one, two, three], transfer } = &handles;
        let works: [&(dyn Fn() + Sync); 6] = [
            &|| drop(allocator.alloc_bytes(MIB, one)),
            &|| {
                // There is none while too many wait for a stream that captures.
                if let Ok(block) = allocator.alloc_bytes(3 * MIB, two) {
                    block.record_stream(three).unwrap();
                }
            },
            &|| drop((allocator.trim_to(8 * MIB), allocator.snapshot(), allocator.stats())),
            &|| {
                device.settle();
                drop(device.stream());
                drop(two.wait_for(&three.tick()));
                drop(device.synchronize());
            },
            &|| drop(transfer.pinned().alloc::<u8>(1 << 16)),
            &|| drop(three.begin_capture().map(|capture| capture.end())),
        ];
        std::thread::scope(|scope| {
            for work in works {
                scope.spawn(move || keep_going(work));
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                for round in 0..100 {
                    let block = allocator.alloc_bytes(MIB, three).ok();
                    in_child(name, round % 2 == 0, || {
                        handles.all_is_refused();
                        // SAFETY: the copy is dropped in place of the original, in the child alone.
                        drop(unsafe { std::ptr::read(&raw const handles) });
                        drop(block);
                    });
                }
            }));
            stop.store(true, Ordering::Relaxed);
            if let Err(panic) = outcome {
                std::panic::resume_unwind(panic);
            }
        });
        drop(handles);
        drop(kept);
    }
}

/// Nothing is refused in a child that was forked before a device was opened, or that starts another
/// program.
#[test]
fn other_programs_that_are_started_are_not_concerned() {
    drop(devices());
    let listed = std::process::Command::new(std::env::current_exe().unwrap()).arg("--list").output().unwrap();
    assert!(listed.status.success());
}
