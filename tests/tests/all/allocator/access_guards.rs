//! Streams take access guards on buffers: what is ordered, what is not, and what fails.

use aquifer::device::sim::Fault;
use aquifer::device::{AccessKind, RequestError};
use aquifer::memory::{AccessGuard, AllocError, Config};
use aquifer::{Allocator, Buffer, Device, Stream};
use aquifer_device::{Code, Operation};
use aquifer_tests::Subject;

struct Bench {
    sim: Subject,
    device: Device,
    allocator: Allocator,
}

impl Bench {
    fn new() -> Bench {
        let sim = Subject::new(64 << 20);
        let device = sim.device();
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        Bench { sim, device, allocator }
    }

    fn streams(&self) -> [Stream; 2] {
        [self.device.stream().unwrap(), self.device.stream().unwrap()]
    }

    fn alloc(&self, stream: &Stream) -> Buffer<u8> {
        self.allocator.alloc(1 << 16, stream).unwrap()
    }
}

fn write(stream: &Stream, buffer: &Buffer<u8>, value: u8) -> Result<(), AllocError> {
    let _access = AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Write)])?;
    Ok(stream.fill(buffer.ptr(), value, buffer.bytes())?)
}

#[test]
fn readers_wait_for_the_writer_and_not_for_each_other() {
    let bench = Bench::new();
    let [one, two] = bench.streams();
    let (buffer, mut bytes) = (bench.alloc(&one), [0; 16]);
    write(&one, &buffer, 7).unwrap();
    let waits = || bench.device.timeline_counts().waits_inserted;
    let before = waits();
    for (stream, expected) in [(&two, 1), (&one, 1), (&two, 1)] {
        let _access = AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
        stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
        assert_eq!((bytes, waits() - before), ([7; 16], expected));
    }
    let own =
        |kind| buffer.storage().ticks_before(kind).unwrap().iter().map(|tick| tick.timeline().id()).collect::<Vec<_>>();
    assert_eq!(own(AccessKind::Read), [one.id()]);
    assert_eq!(own(AccessKind::Write), [one.id(), one.id(), two.id()]);
    write(&two, &buffer, 8).unwrap();
    assert_eq!(own(AccessKind::Write), [two.id()]);
    bench.sim.assert_no_violation();
}

#[test]
fn writing_counts_where_memory_is_listed_twice() {
    let bench = Bench::new();
    let [one, two] = bench.streams();
    let buffer = bench.alloc(&one);
    let part = buffer.slice(100..200);
    for kinds in [[AccessKind::Read, AccessKind::Write], [AccessKind::Write, AccessKind::Read]] {
        drop(AccessGuard::acquire(&two, &[(buffer.storage(), kinds[0]), (part.storage(), kinds[1])]).unwrap());
        let ticks = buffer.storage().ticks_before(AccessKind::Read).unwrap();
        assert_eq!(ticks.iter().map(|tick| tick.timeline().id()).collect::<Vec<_>>(), [two.id()]);
        write(&one, &buffer, 1).unwrap();
    }
}

#[test]
fn another_device_is_refused_and_empty_buffers_need_no_order() {
    let (bench, elsewhere) = (Bench::new(), Bench::new());
    let ([here, _], [there, _]) = (bench.streams(), elsewhere.streams());
    let buffer = elsewhere.alloc(&there);
    assert!(matches!(
        write(&here, &buffer, 1),
        Err(AllocError::Request(RequestError::WrongDevice { what: "buffer", .. }))
    ));
    let [_, other] = bench.streams();
    let empty: Buffer<u8> = bench.allocator.alloc(0, &here).unwrap();
    let before = bench.device.driver_calls();
    drop(AccessGuard::acquire(&other, &[(empty.storage(), AccessKind::Write)]).unwrap());
    assert_eq!(bench.device.driver_calls().since(&before).total(), 0);
}

#[test]
fn a_turn_that_could_not_be_taken_leaves_no_trace() {
    let bench = Bench::new();
    let [one, two] = bench.streams();
    let (first, second) = (bench.alloc(&one), bench.alloc(&one));
    write(&one, &first, 1).unwrap();
    write(&one, &second, 1).unwrap();
    for operation in [Operation::Record, Operation::Wait] {
        bench.sim.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
        let both = [(first.storage().as_ref(), AccessKind::Write), (second.storage().as_ref(), AccessKind::Write)];
        assert!(matches!(AccessGuard::acquire(&two, &both), Err(AllocError::Device(_))));
        for buffer in [&first, &second] {
            let ticks = buffer.storage().ticks_before(AccessKind::Write).unwrap();
            assert_eq!(ticks.iter().map(|tick| tick.timeline().id()).collect::<Vec<_>>(), [one.id()]);
        }
    }
    write(&two, &first, 2).unwrap();
    bench.sim.assert_no_violation();
}

#[test]
fn turns_in_any_order_never_wait_in_a_circle() {
    let bench = Bench::new();
    let [one, two] = bench.streams();
    let (first, second) = (bench.alloc(&one), bench.alloc(&one));
    std::thread::scope(|scope| {
        for (stream, [a, b]) in [(&one, [&first, &second]), (&two, [&second, &first])] {
            scope.spawn(move || {
                for _ in 0..500 {
                    let both = [(a.storage().as_ref(), AccessKind::Read), (b.storage().as_ref(), AccessKind::Write)];
                    let _access = AccessGuard::acquire(stream, &both).unwrap();
                    stream.copy(b.ptr(), a.ptr(), a.bytes()).unwrap();
                }
            });
        }
    });
    bench.sim.assert_no_violation();
}
