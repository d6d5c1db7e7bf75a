//! After warm-up an allocation and a free allocate no host memory. A test program of its own,
//! because it counts what its process allocates.

use std::error::Error;

use allocation_counter::measure;
use aquifer::prelude::{read, with, write};
use aquifer_tests::prelude::*;

/// Sizes of both pools, in an order that splits and merges blocks and moves them between bins.
fn sizes() -> impl Iterator<Item = u64> {
    let mut draw = random::draws(1);
    std::iter::repeat_with(move || (512 << draw(14)) + draw(512))
}

/// Replaces each of the live blocks by one of another size, several times over.
fn churn(
    allocator: &Allocator,
    stream: &Stream,
    live: &mut [Option<Allocation>],
    rounds: usize,
) -> Result<(), AllocError> {
    let mut sizes = sizes();
    for round in 0..rounds {
        for at in 0..live.len() {
            let place = &mut live[(at * 7 + round) % 251];
            drop(place.take());
            *place = sizes.next().map(|bytes| allocator.alloc_bytes(bytes, stream)).transpose()?;
        }
    }
    Ok(())
}

/// Host memory allocated by a program that ran before, and how many events it recorded.
fn allocations_of(options: &str) -> Result<(u64, u64), Box<dyn Error>> {
    let device = aquifer::open("sim:24GiB,checks=off")?;
    let allocator = Allocator::new(&device, Config::parse(options)?)?;
    let stream = device.stream()?;
    let mut live: Vec<Option<Allocation>> = (0..251).map(|_| None).collect();
    // The same program again needs no more records, bins and memory, once its memory is where it
    // needs it.
    let mut moved = None;
    for _ in 0..10 {
        churn(&allocator, &stream, &mut live, 40)?;
        live.iter_mut().for_each(|place| *place = None);
        if moved.replace(allocator.stats().remaps) == Some(allocator.stats().remaps) {
            break;
        }
    }
    let before = allocator.stats().allocation.all.allocated;
    let events = device.timeline_counts().events_recorded;
    let mut done = Ok(());
    let info = measure(|| {
        done = churn(&allocator, &stream, &mut live, 40);
        live.iter_mut().for_each(|place| *place = None);
    });
    done?;
    let during = allocator.stats().allocation.all.allocated - before;
    assert_eq!(during, 40 * 251, "every request was served");
    Ok((info.count_total, device.timeline_counts().events_recorded - events))
}

#[test]
fn operations_allocate_no_host_memory_after_warm_up() {
    assert_eq!(measure(|| drop(std::hint::black_box(Box::new(1)))).count_total, 1, "it does count");
    for options in ["backing:segments", "backing:segments,cross_stream:off", "backing:segments,history:1000"] {
        assert_eq!(allocations_of(options).unwrap(), (0, 0), "with {options:?}");
    }
    // Mapped memory records events now and then, and an event is a piece of host memory.
    for options in ["", "history:1000"] {
        let (allocations, events) = allocations_of(options).unwrap();
        assert!(
            events <= 2 * 40 * 251 / 100 && allocations <= 4 * events,
            "with {options:?}: {allocations}, {events} events"
        );
    }
}

#[test]
fn blocks_given_back_by_another_thread_take_no_host_memory_either() {
    let device = aquifer::open("sim:1GiB,checks=off").unwrap();
    let allocator = Allocator::new(&device, Config::parse("backing:segments").unwrap()).unwrap();
    let stream = device.stream().unwrap();
    let mut blocks: Vec<Option<Allocation>> = (0..100).map(|_| None).collect();
    let mut counts = (0, 0);
    for _ in 0..20 {
        let allocating =
            measure(|| blocks.iter_mut().for_each(|place| *place = allocator.alloc_bytes(4096, &stream).ok()));
        let freeing = || measure(|| blocks.iter_mut().for_each(|place| *place = None));
        let freeing = std::thread::scope(|scope| scope.spawn(freeing).join().unwrap());
        counts = (allocating.count_total, freeing.count_total);
    }
    assert_eq!(allocator.stats().allocation.all.freed, 2000);
    assert_eq!(counts, (0, 0), "allocations of the two threads in the last round");
}

#[test]
fn access_to_one_or_two_buffers_takes_no_host_memory_and_more_take_one_list() {
    let device = aquifer::open("sim:1GiB,checks=off").unwrap();
    let (memory, stream) = (Allocator::new(&device, "").unwrap(), device.stream().unwrap());
    let other = device.stream().unwrap();
    let mut buffers = [(); 3].map(|()| memory.alloc_zeros::<f32>(100, &stream).unwrap());
    let mut access = |count: usize, stream: &Stream| {
        let [one, two, three] = &mut buffers;
        let all = [read(one), write(two), write(three)];
        with(stream, &all[..count], |_, _| Ok::<_, aquifer::Error>(())).unwrap();
    };
    let mut counts = |stream: &Stream| {
        [1, 2, 3].map(|count| {
            access(count, stream);
            measure(|| access(count, stream)).count_total
        })
    };
    assert_eq!(counts(&stream), [0, 0, 1]);
    counts(&other);
    assert_eq!(counts(&other), [0, 0, 1], "on another stream than theirs");

    let alloc = || drop(std::hint::black_box(memory.alloc::<f32>(100, &stream).unwrap()));
    alloc();
    assert_eq!(measure(alloc).count_total, 1, "what its handles share");
    let [x, ..] = &buffers;
    assert_eq!(measure(|| assert_eq!(x.slice(10..).slice(..5).len(), 5)).count_total, 0);
}
