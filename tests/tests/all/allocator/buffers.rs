//! Buffers of every kind of memory: blocks, private pools, memory that grows, memory that others
//! have a handle of. Streams take access guards on all of them in the same way.

use aquifer_tests::prelude::*;
use proptest::prelude::*;

use super::access_guards::write;

const CAPACITY: u64 = 128 * MIB;

/// The first and the last byte.
fn ends(stream: &Stream, buffer: &Buffer<u8>) -> [u8; 2] {
    let mut bytes = [[0], [0]];
    let _access = AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
    for (byte, at) in bytes.iter_mut().zip([0, buffer.bytes() - 1]) {
        stream.download_blocking(byte, buffer.ptr().offset(at)).unwrap();
    }
    bytes.concat().try_into().unwrap()
}

#[test]
fn access_guards_order_streams_on_memory_that_grows() {
    let bench = Bench::new(CAPACITY, "");
    let (one, two, three) = (&bench.stream, &bench.side, &bench.new_stream());
    let mut cache = bench.allocator.growable(100 * MIB, one).unwrap();
    assert!(Buffer::<u8>::of(cache.storage()).is_empty());
    cache.grow_to(10 * MIB, one).unwrap();
    let small: Buffer<u8> = Buffer::of(cache.storage());
    bench.stall(one, Duration::from_millis(5));
    write(one, &small, 1).unwrap();
    assert_eq!(ends(two, &small), [1, 1]);
    cache.grow_to(50 * MIB, two).unwrap();
    let large: Buffer<u8> = Buffer::of(cache.storage());
    assert_eq!((small.bytes(), large.bytes(), large.ptr()), (10 * MIB, 50 * MIB, small.ptr()));
    write(three, &large.slice(10 << 20..), 2).unwrap();
    assert_eq!((ends(one, &large), ends(two, &small)), ([1, 2], [1, 1]));
    drop(cache);
    drop(large);
    assert_eq!(ends(one, &small), [1, 1], "a buffer keeps the memory");
    drop(small);
    bench.assert_returned();
}

#[test]
fn memory_does_not_grow_under_an_access_guard_of_the_same_thread() {
    let bench = Bench::new(CAPACITY, "");
    let one = &bench.stream;
    let mut cache = bench.allocator.growable(100 * MIB, one).unwrap();
    cache.grow_to(4 * MIB, one).unwrap();
    let buffer: Buffer<u8> = Buffer::of(cache.storage());
    let access = AccessGuard::acquire(one, &[(buffer.storage(), AccessKind::Write)]).unwrap();
    assert!(matches!(cache.grow_to(40 * MIB, one), Err(AllocError::AccessHeld)));
    assert_eq!((cache.bytes(), bench.allocator.memory_reserved()), (4 * MIB, 4 * MIB));
    drop(access);
    cache.grow_to(40 * MIB, one).unwrap();
    write(one, &Buffer::of(cache.storage()), 1).unwrap();
    drop((cache, buffer));
    bench.assert_returned();
}

#[test]
fn memory_does_not_shrink_below_buffers() {
    let bench = Bench::new(CAPACITY, "");
    let Bench { stream: one, side: two, .. } = &bench;
    let mut cache = bench.allocator.growable(100 * MIB, one).unwrap();
    cache.grow_to(30 * MIB, one).unwrap();
    let buffer: Buffer<u32> = Buffer::of(cache.storage());
    assert_eq!((buffer.bytes(), buffer.len()), (30 * MIB, (30 << 20) / 4));
    assert!(matches!(cache.shrink_to(20 * MIB, one), Err(AllocError::Shared { .. })));
    assert_eq!((cache.bytes(), bench.allocator.memory_allocated()), (30 * MIB, 30 * MIB));
    cache.grow_to(40 * MIB, one).unwrap();
    bench.stall(two, Duration::from_secs(1));
    let bytes = buffer.reinterpret().unwrap().share();
    write(two, &bytes, 5).unwrap();
    drop((buffer, bytes));
    cache.shrink_to(2 * MIB, one).unwrap();
    assert_eq!((cache.bytes(), Buffer::<u32>::of(cache.storage()).bytes()), (2 * MIB, 2 * MIB));
    // What it had is not reused before the work of the stream that accessed it is done.
    let block: Buffer<u8> = bench.allocator.alloc(100 << 20, one).unwrap();
    write(one, &block, 6).unwrap();
    drop((cache, block));
    bench.assert_returned();
}

#[test]
fn memory_grown_into_again_is_ordered_for_every_stream() {
    let bench = Bench::new(CAPACITY, "");
    let (one, two, three) = (&bench.stream, &bench.side, &bench.new_stream());
    let mut cache = bench.allocator.growable(100 * MIB, one).unwrap();
    cache.grow_to(60 * MIB, one).unwrap();
    bench.stall(two, Duration::from_millis(50));
    two.wait_for(&one.tick()).unwrap();
    two.fill(cache.ptr(), 1, cache.bytes()).unwrap();
    cache.shrink_to(10 * MIB, two).unwrap();
    cache.grow_to(60 * MIB, one).unwrap();
    // Only the growth orders this stream after the other's work on the memory that was given up.
    write(three, &Buffer::<u8>::of(cache.storage()).slice(20 << 20..), 2).unwrap();
    assert_eq!(ends(one, &Buffer::of(cache.storage())), [1, 2]);
    drop(cache);
    bench.assert_returned();
}

#[test]
fn exportable_memory_is_shared_by_its_buffers() {
    for options in ["", "backing:segments"] {
        let bench = Bench::new(CAPACITY, options);
        let Bench { stream: one, side: two, .. } = &bench;
        let shared = bench.allocator.alloc_exportable(5 * MIB, HandleKind::PosixFd, one).unwrap();
        let buffer: Buffer<u8> = Buffer::of(shared.storage());
        assert_eq!((buffer.bytes(), buffer.ptr()), (5 * MIB, shared.ptr()));
        bench.stall(one, Duration::from_millis(5));
        write(one, &buffer, 3).unwrap();
        drop(shared);
        assert_eq!(ends(two, &buffer), [3, 3]);
        drop(buffer);
        bench.assert_returned();
    }
}

#[test]
fn pools_and_allocations_make_buffers() {
    let bench = Bench::new(CAPACITY, "");
    let (one, two, three) = (&bench.stream, &bench.side, &bench.new_stream());
    let pool = bench.pool();
    let buffer: Buffer<u8> = bench.allocator.alloc_in(&pool, 3 << 20, one).unwrap();
    let snapshot = bench.allocator.snapshot();
    let of_pool = snapshot.segments.iter().filter(|segment| segment.segment_pool_id == pool.id());
    assert_eq!(of_pool.map(|segment| segment.active_size).sum::<u64>(), 3 * MIB);
    let allocation = bench.alloc_on(one, 3 * MIB);
    two.wait_for(&one.tick()).unwrap();
    bench.stall(two, Duration::from_millis(5));
    two.fill(allocation.ptr(), 4, 3 * MIB).unwrap();
    let taken = bench.allocator.buffer_of::<u8>(allocation, two).unwrap();
    assert_eq!(ends(three, &taken), [4, 4]);
    bench.stall(two, Duration::from_millis(5));
    write(two, &taken, 5).unwrap();
    drop(taken);
    write(one, &bench.allocator.alloc(3 << 20, one).unwrap(), 6).unwrap();
    drop((buffer, pool));

    let elsewhere = Bench::new(CAPACITY, "");
    let foreign = bench.alloc_on(one, MIB);
    let refused = bench.allocator.buffer_of::<u8>(foreign, &elsewhere.stream);
    assert!(matches!(refused, Err(aquifer::Error::Request(RequestError::WrongDevice { .. }))));
    let foreign = bench.alloc_on(one, MIB);
    let refused = elsewhere.allocator.buffer_of::<u8>(foreign, &elsewhere.stream);
    assert!(matches!(refused, Err(aquifer::Error::Request(RequestError::WrongDevice { .. }))));
    elsewhere.assert_returned();
    bench.assert_returned();
}

#[test]
fn access_guards_on_growable_memory_are_refused_while_the_allocator_sleeps() {
    let bench = Bench::new(CAPACITY, "");
    let one = &bench.stream;
    let mut cache = bench.allocator.growable(10 * MIB, one).unwrap();
    cache.grow_to(4 * MIB, one).unwrap();
    let buffer: Buffer<u8> = Buffer::of(cache.storage());
    write(one, &buffer, 7).unwrap();
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    assert!(matches!(write(one, &buffer, 8), Err(AllocError::Asleep)));
    bench.allocator.wake().unwrap();
    assert_eq!(ends(one, &buffer), [7, 7]);
    drop((cache, buffer));
    bench.assert_returned();
}

#[derive(Clone, Debug)]
enum Step {
    Grow(usize, u64, usize),
    Shrink(usize, u64, usize),
    Replace(usize, usize),
    Share(usize),
    Forget(usize),
    Write(usize, usize),
    Read(usize, usize),
    Block(u64, usize),
    Stall(usize),
    Trim(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (cache, stream, mib) = (0..2_usize, 0..3_usize, 0..61_u64);
    prop_oneof![
        4 => (cache.clone(), mib.clone(), stream.clone()).prop_map(|(cache, mib, by)| Step::Grow(cache, mib, by)),
        3 => (cache.clone(), mib.clone(), stream.clone()).prop_map(|(cache, mib, by)| Step::Shrink(cache, mib, by)),
        1 => (cache.clone(), stream.clone()).prop_map(|(cache, by)| Step::Replace(cache, by)),
        3 => cache.prop_map(Step::Share),
        4 => any::<usize>().prop_map(Step::Forget),
        4 => (any::<usize>(), stream.clone()).prop_map(|(buffer, by)| Step::Write(buffer, by)),
        3 => (any::<usize>(), stream.clone()).prop_map(|(buffer, by)| Step::Read(buffer, by)),
        2 => (1..40_u64, stream.clone()).prop_map(|(mib, by)| Step::Block(mib, by)),
        2 => stream.prop_map(Step::Stall),
        1 => mib.prop_map(Step::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: u32::try_from(Subject::share(150)).unwrap(), ..ProptestConfig::default() })]
    /// Buffers share memory that grows and shrinks. Access guards alone order the streams.
    #[test]
    fn access_guards_are_all_the_order_that_programs_need(steps in prop::collection::vec(step(), 1..80)) {
        let bench = Bench::new(CAPACITY, "");
        let Bench { driver, allocator, .. } = &bench;
        let streams = &[bench.stream.clone(), bench.side.clone(), bench.new_stream()];
        let new = |by: usize| allocator.growable(60 * MIB, &streams[by]).unwrap();
        let mut caches: Vec<Growable> = vec![new(0), new(1)];
        let mut buffers: Vec<Buffer<u8>> = Vec::new();
        for step in steps {
            match step {
                Step::Grow(cache, mib, by) => drop(caches[cache].grow_to(mib * MIB, &streams[by])),
                Step::Shrink(cache, mib, by) => {
                    let shared = buffers.iter().any(|buffer| buffer.ptr() == caches[cache].ptr());
                    let smaller = mib * MIB < caches[cache].bytes();
                    // Others must be ordered before the shrinking stream where they used what it
                    // gives up.
                    for stream in streams {
                        streams[by].wait_for(&stream.tick()).unwrap();
                    }
                    prop_assert_eq!(caches[cache].shrink_to(mib * MIB, &streams[by]).is_err(), shared && smaller);
                }
                Step::Replace(cache, by) => caches[cache] = new(by),
                Step::Share(cache) if caches[cache].bytes() > 0 => {
                    let buffer = Buffer::of(caches[cache].storage());
                    write(&streams[0], &buffer, 3).unwrap();
                    buffers.push(buffer);
                }
                Step::Forget(buffer) if !buffers.is_empty() => drop(buffers.swap_remove(buffer % buffers.len())),
                Step::Write(buffer, by) if !buffers.is_empty() => {
                    write(&streams[by], &buffers[buffer % buffers.len()], 1).unwrap();
                }
                Step::Read(buffer, by) if !buffers.is_empty() => {
                    ends(&streams[by], &buffers[buffer % buffers.len()]);
                }
                Step::Block(mib, by) => {
                    if let Ok(block) = allocator.alloc(usize::try_from(mib * MIB).unwrap(), &streams[by]) {
                        write(&streams[by], &block, 2).unwrap();
                        buffers.push(block);
                    }
                }
                Step::Stall(by) => driver.stall(&streams[by], Duration::from_millis(1)).unwrap(),
                Step::Trim(mib) => {
                    let _ = allocator.trim_to(mib * MIB);
                }
                Step::Share(_) | Step::Forget(_) | Step::Write(..) | Step::Read(..) => {}
            }
            prop_assert!(driver.violations().is_empty(), "{:?}", driver.violations());
        }
        drop((caches, buffers));
        bench.assert_returned();
    }
}
