//! Access guards on buffers: which work they order, and how they fail.

use aquifer_tests::prelude::*;

const CAPACITY: u64 = 64 * MIB;

fn buffer(bench: &Bench) -> Buffer<u8> {
    bench.allocator.alloc(1 << 16, &bench.stream).unwrap()
}

/// The streams of the ticks that an access waits for.
fn streams_before(buffer: &Buffer<u8>, kind: AccessKind) -> Vec<u32> {
    buffer.storage().ticks_before(kind).unwrap().iter().map(|tick| tick.timeline().id()).collect()
}

/// Writes a buffer under an access guard.
pub(super) fn write(stream: &Stream, buffer: &Buffer<u8, impl Handle>, value: u8) -> Result<(), AllocError> {
    let _access = AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Write)])?;
    Ok(stream.fill(buffer.ptr(), value, buffer.bytes())?)
}

#[test]
fn readers_wait_for_the_writer_and_not_for_each_other() {
    let bench = Bench::new(CAPACITY, "");
    let Bench { stream: one, side: two, .. } = &bench;
    let (buffer, mut bytes) = (buffer(&bench), [0; 16]);
    write(one, &buffer, 7).unwrap();
    let waits = || bench.device.timeline_counts().waits_inserted;
    let before = waits();
    for (stream, expected) in [(two, 1), (one, 1), (two, 1)] {
        let _access = AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
        stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
        assert_eq!((bytes, waits() - before), ([7; 16], expected));
    }
    assert_eq!(streams_before(&buffer, AccessKind::Read), [one.id()]);
    assert_eq!(streams_before(&buffer, AccessKind::Write), [one.id(), one.id(), two.id()]);
    write(two, &buffer, 8).unwrap();
    assert_eq!(streams_before(&buffer, AccessKind::Write), [two.id()]);
    bench.driver.assert_no_violation();
}

#[test]
fn writing_counts_where_memory_is_listed_twice() {
    let bench = Bench::new(CAPACITY, "");
    let Bench { stream: one, side: two, .. } = &bench;
    let buffer = buffer(&bench);
    let part = buffer.slice(100..200);
    for kinds in [[AccessKind::Read, AccessKind::Write], [AccessKind::Write, AccessKind::Read]] {
        drop(AccessGuard::acquire(two, &[(buffer.storage(), kinds[0]), (part.storage(), kinds[1])]).unwrap());
        assert_eq!(streams_before(&buffer, AccessKind::Read), [two.id()]);
        write(one, &buffer, 1).unwrap();
    }
}

#[test]
fn another_device_is_refused_and_empty_buffers_need_no_order() {
    let (bench, elsewhere) = (Bench::new(CAPACITY, ""), Bench::new(CAPACITY, ""));
    let Bench { stream: here, side: other, .. } = &bench;
    let buffer = buffer(&elsewhere);
    assert!(matches!(
        write(here, &buffer, 1),
        Err(AllocError::Request(RequestError::WrongDevice { what: "buffer", .. }))
    ));
    let empty: Buffer<u8> = bench.allocator.alloc(0, here).unwrap();
    let before = bench.device.driver_calls();
    drop(AccessGuard::acquire(other, &[(empty.storage(), AccessKind::Write)]).unwrap());
    assert_eq!(bench.device.driver_calls().since(&before).total(), 0);
}

#[test]
fn an_access_guard_that_could_not_be_acquired_leaves_no_trace() {
    let bench = Bench::new(CAPACITY, "");
    let Bench { stream: one, side: two, .. } = &bench;
    let (first, second) = (buffer(&bench), buffer(&bench));
    write(one, &first, 1).unwrap();
    write(one, &second, 1).unwrap();
    for operation in [Operation::Record, Operation::Wait] {
        bench.fail(operation, 1, Code(999));
        let both = [(first.storage(), AccessKind::Write), (second.storage(), AccessKind::Write)];
        assert!(matches!(AccessGuard::acquire(two, &both), Err(AllocError::Device(_))));
        for buffer in [&first, &second] {
            assert_eq!(streams_before(buffer, AccessKind::Write), [one.id()]);
        }
    }
    write(two, &first, 2).unwrap();
    bench.driver.assert_no_violation();
}

#[test]
fn access_guards_acquired_in_any_order_never_deadlock() {
    let bench = Bench::new(CAPACITY, "");
    let Bench { stream: one, side: two, .. } = &bench;
    let (first, second) = (buffer(&bench), buffer(&bench));
    std::thread::scope(|scope| {
        for (stream, [a, b]) in [(one, [&first, &second]), (two, [&second, &first])] {
            scope.spawn(move || {
                for _ in 0..500 {
                    let both = [(a.storage(), AccessKind::Read), (b.storage(), AccessKind::Write)];
                    let _access = AccessGuard::acquire(stream, &both).unwrap();
                    stream.copy(b.ptr(), a.ptr(), a.bytes()).unwrap();
                }
            });
        }
    });
    bench.driver.assert_no_violation();
}
