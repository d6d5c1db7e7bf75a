//! Programs with one ordering mistake each: found under every seed, and nothing is found in their
//! corrected twins.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::{Driver, RawStream};
use aquifer_sim::{SimDriver, ViolationKind};

use crate::common::{GRANULE, MIB, Short, device};

const SEEDS: u64 = 1000;

/// Runs `program(driver, correct)` both ways under every seed. A violation of the wrong one must
/// name both operations with their streams, the memory where they met, and the missing order.
fn check(kind: ViolationKind, first: &str, second: &str, program: impl Fn(&SimDriver, bool)) {
    for seed in 0..SEEDS {
        let wrong = device(seed);
        program(&wrong, false);
        let found = wrong.violations();
        let named =
            found.iter().find(|violation| violation.kind == kind).unwrap_or_else(|| panic!("{seed}: {found:?}"));
        let text = named.to_string();
        assert!(named.first.unwrap().to_string().contains(first), "seed {seed}: {text}");
        assert!(named.second.to_string().contains(second), "seed {seed}: {text}");
        assert!(text.contains(first) && text.contains(second), "seed {seed}: {text}");
        let (earlier, met) = (named.first.unwrap(), &named.range);
        assert!(
            met.start < met.end && text.contains(&format!("{:#x}..{:#x}", met.start, met.end)),
            "seed {seed}: {text}"
        );
        let edge = [earlier, named.second].map(|op| format!("#{}'", op.number));
        assert!(edge.iter().all(|op| named.missing.contains(op)), "seed {seed}: {text}");
        let streams = [earlier, named.second].into_iter().filter_map(|op| op.stream).map(|stream| stream.to_string());
        assert!(streams.into_iter().all(|stream| named.missing.contains(&stream)), "seed {seed}: {text}");

        let right = device(seed);
        program(&right, true);
        right.synchronize().unwrap();
        assert_eq!(right.violations(), [], "seed {seed}");
    }
}

#[test]
fn memory_reused_on_another_stream_without_a_wait() {
    check(ViolationKind::WriteWrite, "'kernel axpy #1'", "'memset #2'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let memory = driver.alloc(MIB).unwrap();
        driver.kernel("axpy", &[(memory, MIB, Write)], None, one).unwrap();
        if correct {
            driver.order(one, two);
        }
        driver.memset(memory.offset(100), 1, 100, two).unwrap();
    });
}

#[test]
fn memory_overwritten_while_another_stream_reads_it() {
    check(ViolationKind::ReadWrite, "'kernel sum #2'", "'copy on device #3'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let memory = driver.alloc(MIB).unwrap();
        driver.memset(memory, 0, MIB, one).unwrap();
        driver.order(one, two);
        driver.kernel("sum", &[(memory, MIB, Read)], None, one).unwrap();
        if correct {
            driver.order(one, two);
        }
        driver.copy_on_device(memory, memory.offset(MIB / 2), 64, two).unwrap();
    });
}

#[test]
fn page_locked_memory_written_by_the_host_in_flight() {
    check(ViolationKind::HostAccess, "'copy to device #1'", "'host access #2'", |driver, correct| {
        let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
        let host = driver.host_alloc(4096).unwrap();
        driver.upload(memory, host, 4096, stream);
        if correct {
            driver.synchronize_stream(stream).unwrap();
        }
        driver.host_access(host, 1, Write).unwrap();
    });
}

#[test]
fn page_locked_memory_read_by_the_host_before_the_copy_to_it_is_done() {
    check(ViolationKind::HostAccess, "'copy to host #2'", "'host access #", |driver, correct| {
        let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
        let (host, event) = (driver.host_alloc(4096).unwrap(), driver.event());
        driver.memset(memory, 1, 4096, stream).unwrap();
        driver.download(host, memory, 4096, stream);
        driver.record(event, stream).unwrap();
        if correct {
            while !driver.query_event(event).unwrap() {}
        }
        driver.host_access(host, 4096, Read).unwrap();
    });
}

#[test]
fn memory_unmapped_while_work_is_pending() {
    check(ViolationKind::PendingWork, "'memset #1'", "'cuMemUnmap #2'", |driver, correct| {
        let (stream, (memory, _)) = (driver.stream(), driver.mapped());
        driver.memset(memory, 1, GRANULE, stream).unwrap();
        if correct {
            driver.synchronize_stream(stream).unwrap();
        }
        driver.unmap(memory, GRANULE).unwrap();
    });
}

#[test]
fn physical_memory_released_while_work_is_pending() {
    check(ViolationKind::PendingWork, "'kernel fill #1'", "'cuMem", |driver, correct| {
        let (stream, (memory, physical)) = (driver.stream(), driver.mapped());
        // Work that found its memory unmapped would lose the device before the second mistake is
        // made.
        driver.stall(stream, Duration::from_secs(1)).unwrap();
        driver.kernel("fill", &[(memory, GRANULE, Write)], None, stream).unwrap();
        if correct {
            driver.synchronize().unwrap();
        }
        driver.unmap(memory, GRANULE).unwrap();
        driver.release_physical(physical).unwrap();
        let found = driver.violations();
        assert!(correct || found.iter().any(|violation| violation.to_string().contains("'cuMemRelease #3'")));
    });
}

#[test]
fn mapped_memory_whose_handle_is_gone_unmapped_while_work_is_pending() {
    check(ViolationKind::PendingWork, "'memset #1'", "'cuMemUnmap", |driver, correct| {
        let (stream, (memory, physical)) = (driver.stream(), driver.mapped());
        driver.memset(memory, 1, 8, stream).unwrap();
        driver.release_physical(physical).unwrap();
        if correct {
            driver.synchronize().unwrap();
        }
        driver.unmap(memory, GRANULE).unwrap();
    });
}

#[test]
fn page_locked_memory_freed_while_work_is_pending() {
    check(ViolationKind::PendingWork, "'copy to device #1'", "'cuMemFreeHost #2'", |driver, correct| {
        let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
        let host = driver.host_alloc(4096).unwrap();
        driver.upload(memory, host, 4096, stream);
        if correct {
            driver.synchronize_stream(stream).unwrap();
        }
        // SAFETY: nothing has a reference to it, and the simulator keeps what a copy still uses.
        unsafe { driver.host_free(host) }.unwrap();
        driver.synchronize().unwrap();
    });
}

#[test]
fn pool_memory_freed_while_another_stream_uses_it() {
    check(ViolationKind::PendingWork, "'memset #2'", "'pool free #3'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let memory = driver.alloc_async(MIB, one).unwrap();
        driver.order(one, two);
        driver.memset(memory, 1, MIB, two).unwrap();
        if correct {
            driver.order(two, one);
        }
        driver.free_async(memory, one).unwrap();
    });
}

#[test]
fn pool_memory_used_on_another_stream_before_it_is_allocated() {
    check(ViolationKind::WriteWrite, "'pool allocation #1'", "'memset #2'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let memory = driver.alloc_async(MIB, one).unwrap();
        if correct {
            driver.order(one, two);
        }
        driver.memset(memory, 1, MIB, two).unwrap();
    });
}

#[test]
fn event_recorded_before_the_work_it_should_cover() {
    check(ViolationKind::WriteRead, "'memset #1'", "'kernel sum #2'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let (memory, event) = (driver.alloc(MIB).unwrap(), driver.event());
        if !correct {
            driver.record(event, one).unwrap();
        }
        driver.memset(memory, 1, MIB, one).unwrap();
        if correct {
            driver.record(event, one).unwrap();
        }
        driver.wait(two, event).unwrap();
        driver.kernel("sum", &[(memory, MIB, Read)], None, two).unwrap();
    });
}

#[test]
fn wait_for_a_record_that_is_older_than_the_work() {
    check(ViolationKind::WriteRead, "'memset #2'", "'kernel sum #3'", |driver, correct| {
        let (one, two) = (driver.stream(), driver.stream());
        let (memory, event) = (driver.alloc(MIB).unwrap(), driver.event());
        driver.memset(memory, 1, MIB, one).unwrap();
        driver.record(event, one).unwrap();
        if !correct {
            driver.wait(two, event).unwrap();
        }
        driver.memset(memory, 2, MIB, one).unwrap();
        driver.record(event, one).unwrap(); // changes no wait that was made before
        if correct {
            driver.wait(two, event).unwrap();
        }
        driver.kernel("sum", &[(memory, MIB, Read)], None, two).unwrap();
    });
}

#[test]
fn host_waits_for_an_event_recorded_again_elsewhere() {
    check(ViolationKind::PendingWork, "'memset #1'", "'cuMemUnmap", |driver, correct| {
        let (one, two, event) = (driver.stream(), driver.stream(), driver.event());
        let (memory, _) = driver.mapped();
        driver.memset(memory, 1, GRANULE, one).unwrap();
        driver.record(event, one).unwrap();
        if !correct {
            driver.record(event, two).unwrap();
        }
        driver.synchronize_event(event).unwrap();
        driver.unmap(memory, GRANULE).unwrap();
    });
}

#[test]
fn handle_of_a_destroyed_stream_comes_back_for_a_new_one() {
    check(ViolationKind::WriteWrite, "'memset #1' on stream 2 ", "'memset #2' on stream 1 ", |driver, correct| {
        let (other, old) = (driver.stream(), driver.stream());
        let (memory, event) = (driver.alloc(MIB).unwrap(), driver.event());
        driver.memset(memory, 1, MIB, old).unwrap();
        if correct {
            driver.record(event, old).unwrap();
        }
        driver.destroy_stream(old).unwrap();
        let new = driver.stream();
        assert_eq!(new, old, "handles come back");
        if !correct {
            driver.record(event, new).unwrap();
        }
        driver.wait(other, event).unwrap();
        driver.memset(memory, 2, MIB, other).unwrap();
    });
}

#[test]
fn per_thread_stream_taken_for_another_threads() {
    check(ViolationKind::WriteWrite, "'memset #1' on per-thread stream", "'memset #2'", |driver, correct| {
        let (stream, event) = (driver.stream(), driver.event());
        let memory = driver.alloc(MIB).unwrap();
        let (used, recorded) = (mpsc::channel(), mpsc::channel());
        thread::scope(|scope| {
            scope.spawn(move || {
                driver.memset(memory, 1, MIB, RawStream::PER_THREAD).unwrap();
                if correct {
                    driver.record(event, RawStream::PER_THREAD).unwrap();
                }
                used.0.send(()).unwrap();
                recorded.1.recv().unwrap();
            });
            used.1.recv().unwrap();
            if !correct {
                driver.record(event, RawStream::PER_THREAD).unwrap();
            }
            driver.wait(stream, event).unwrap();
            driver.memset(memory, 2, MIB, stream).unwrap();
            recorded.0.send(()).unwrap();
        });
    });
}

#[test]
fn per_thread_streams_are_covered_by_an_event_on_the_legacy_stream() {
    for seed in 0..SEEDS {
        let driver = &device(seed);
        let (stream, event) = (driver.stream(), driver.event());
        let memory = driver.alloc(MIB).unwrap();
        thread::scope(|scope| {
            let uses = scope.spawn(|| driver.memset(memory, 1, MIB, RawStream::PER_THREAD));
            uses.join().unwrap().unwrap();
        });
        driver.record(event, RawStream::LEGACY).unwrap();
        driver.wait(stream, event).unwrap();
        driver.memset(memory, 2, MIB, stream).unwrap();
        driver.synchronize().unwrap();
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn non_blocking_stream_taken_for_one_that_the_legacy_stream_waits_for() {
    check(ViolationKind::WriteRead, "'memset #1'", "'kernel sum #2' on the legacy stream", |driver, correct| {
        let stream = if correct { driver.blocking_stream() } else { driver.stream() };
        let memory = driver.alloc(MIB).unwrap();
        driver.memset(memory, 1, MIB, stream).unwrap();
        driver.kernel("sum", &[(memory, MIB, Read)], None, RawStream::LEGACY).unwrap();
    });
}
