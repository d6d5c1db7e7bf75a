//! Buffers that move between streams: the results are those of the program's order, and the race
//! detector finds nothing.

use std::time::Duration;

use aquifer::Buffer;
use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, Device, Operation, Stream};
use aquifer_kernels::{KernelError, Kernels};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

use crate::bench::Bench;

const LEN: u64 = 3000;

#[derive(Clone, Copy, Debug)]
enum Step {
    Fill(usize, i32),
    /// The first becomes the sum of the others.
    Add(usize, usize, usize),
    /// Half of the first becomes the sum of two halves of the other.
    Halves(usize, usize),
    Spin(u64),
    /// Drops the buffer and allocates another one, for this stream.
    Renew(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let buffer = || 0..BUFFERS;
    prop_oneof![
        (buffer(), any::<i32>()).prop_map(|(to, value)| Step::Fill(to, value)),
        (buffer(), buffer(), buffer()).prop_map(|(to, a, b)| Step::Add(to, a, b)),
        (buffer(), buffer()).prop_map(|(to, from)| Step::Halves(to, from)),
        (0u64..100_000).prop_map(Step::Spin),
        buffer().prop_map(Step::Renew),
    ]
}

const BUFFERS: usize = 4;
const STREAMS: usize = 3;

fn enqueue(bench: &Bench, stream: &Stream, buffers: &mut [Buffer<i32>], model: &mut [Vec<i32>], step: Step) {
    let kernels = &bench.kernels;
    match step {
        Step::Fill(to, value) => {
            kernels.fill(stream, &mut buffers[to], value).unwrap();
            model[to].fill(value);
        }
        Step::Add(to, a, b) => {
            let (left, right) = (buffers[a].share(), buffers[b].share());
            kernels.add(stream, &left, &right, &mut buffers[to]).unwrap();
            model[to] = model[a].iter().zip(&model[b]).map(|(a, b)| a.wrapping_add(*b)).collect();
        }
        Step::Halves(to, from) => {
            let half = LEN as usize / 2;
            let (left, right) = (buffers[from].slice(..half).share(), buffers[from].slice(half..).share());
            let mut target = buffers[to].slice_mut(half..);
            kernels.add(stream, &left, &right, &mut target).unwrap();
            let (low, high) = model[from].split_at(half);
            let sums: Vec<i32> = low.iter().zip(high).map(|(a, b)| a.wrapping_add(*b)).collect();
            model[to][half..].copy_from_slice(&sums);
        }
        Step::Spin(ns) => kernels.spin(stream, Duration::from_nanos(ns)).unwrap(),
        Step::Renew(which) => {
            buffers[which] = bench.allocator.alloc(LEN as usize, stream).unwrap();
            kernels.fill(stream, &mut buffers[which], 1i32).unwrap();
            model[which].fill(1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn programs_on_several_streams_give_what_their_order_says(
        steps in proptest::collection::vec((step(), 0..STREAMS), 1..60),
        seed in any::<u64>(),
    ) {
        let bench = match std::env::var_os("AQUIFER_TEST_DEVICE") {
            Some(_) => Bench::new(),
            None => Bench::on(Device::new(SimDriver::new(SimConfig::new(64 << 20).seed(seed)))),
        };
        let streams: Vec<Stream> = (0..STREAMS).map(|_| bench.device.stream().unwrap()).collect();
        let mut buffers: Vec<Buffer<i32>> = (0..BUFFERS).map(|_| bench.upload(&vec![1; LEN as usize])).collect();
        let mut model = vec![vec![1; LEN as usize]; BUFFERS];
        for (step, stream) in steps {
            enqueue(&bench, &streams[stream], &mut buffers, &mut model, step);
        }
        for (buffer, should) in buffers.iter().zip(&model) {
            prop_assert_eq!(&bench.download(buffer), should);
        }
        prop_assert_eq!(bench.device.driver().take_violation(), None);
    }
}

#[test]
fn threads_share_buffers() {
    let bench = Bench::new();
    let buffers: Vec<Buffer<u32>> = (0..3).map(|_| bench.upload(&[0; 1000])).collect();
    let ones = bench.upload(&[1u32; 1000]);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (bench, buffers, ones) = (&bench, &buffers, &ones);
            scope.spawn(move || {
                let stream = bench.device.stream().unwrap();
                for round in 0..50 {
                    // Input and output are the same: each launch adds one, in any order.
                    let buffer: &Buffer<u32> = &buffers[(thread + round) % buffers.len()];
                    bench.kernels.add(&stream, buffer, ones, &mut buffer.share()).unwrap();
                }
            });
        }
    });
    let sums: Vec<u32> = buffers.iter().map(|buffer| bench.download(buffer)[999]).collect();
    assert_eq!(sums.iter().sum::<u32>(), 200, "{sums:?}");
}

#[test]
fn dropped_memory_is_not_reused_before_other_streams_are_done() {
    let bench = Bench::new();
    let other = bench.device.stream().unwrap();
    let mut findings = bench.upload(&[0u64; 2]);
    for round in 0..20 {
        let mut memory: Buffer<u8> = bench.alloc(1 << 20);
        bench.kernels.pattern_write(&bench.stream, &mut memory, round).unwrap();
        bench.kernels.spin(&other, Duration::from_micros(200)).unwrap();
        bench.kernels.pattern_verify(&other, &memory, round, &mut findings).unwrap();
        // Dropped at once, and allocated again in the next round, while the other stream still
        // spins.
    }
    assert_eq!(bench.kernels.mismatches(&bench.stream, &findings).unwrap(), None);
}

#[test]
fn one_stream_needs_no_events_and_a_dependency_one() {
    let bench = Bench::new();
    let other = bench.device.stream().unwrap();
    let (mut x, mut y) = (bench.upload(&[1f32; 100]), bench.upload(&[1f32; 100]));
    let before = bench.device.timeline_counts();
    for _ in 0..10 {
        bench.kernels.axpy(&bench.stream, 2.0, &x, &mut y).unwrap();
    }
    assert_eq!(bench.device.timeline_counts(), before);
    for _ in 0..10 {
        bench.kernels.axpy(&other, 2.0, &x, &mut y).unwrap();
    }
    let after = bench.device.timeline_counts();
    assert_eq!(after.events_recorded - before.events_recorded, 1);
    assert_eq!(after.waits_inserted - before.waits_inserted, 1);
    // Memory that another stream reads can be read without waiting, but not written.
    let calls = bench.device.driver_calls();
    let mut z = bench.upload(&[1f32; 100]);
    bench.kernels.add(&bench.stream, &x, &x.share(), &mut z).unwrap();
    assert_eq!(bench.device.driver_calls().since(&calls).of(Operation::Wait), 0);
    bench.kernels.fill(&bench.stream, &mut x, 0f32).unwrap();
    assert_eq!(bench.device.driver_calls().since(&calls).of(Operation::Wait), 1);
}

#[test]
fn accesses_without_a_guard_are_found_by_the_detector() {
    let bench = Bench::new();
    if !bench.is_simulated() {
        return;
    }
    let other = bench.device.stream().unwrap();
    let mut memory = bench.alloc::<u8>(1000);
    bench.kernels.pattern_write(&bench.stream, &mut memory, 1).unwrap();
    other.fill(memory.ptr(), 0, 1000).unwrap();
    let found = bench.device.driver().take_violation().unwrap();
    assert!(found.contains("pattern_write"), "{found}");
    while bench.device.driver().take_violation().is_some() {}
}

#[test]
fn graphs_are_captured_and_replayed() {
    let bench = Bench::new();
    let (x, mut y) = (bench.upload(&[1i32; 100]), bench.upload(&[0i32; 100]));
    let capture = bench.stream.begin_capture().unwrap();
    bench.kernels.add(&bench.stream, &x, &y.share(), &mut y).unwrap();
    let graph = capture.end().unwrap();
    for _ in 0..3 {
        let access =
            AccessGuard::acquire(&bench.stream, &[(x.storage(), AccessKind::Read), (y.storage(), AccessKind::Write)]);
        let _access = access.unwrap();
        graph.launch(&bench.stream).unwrap();
    }
    assert_eq!(bench.download(&y), [3; 100]);
}

#[test]
fn a_capture_refuses_memory_of_unordered_streams() {
    let bench = Bench::new();
    let other = bench.device.stream().unwrap();
    let mut memory = bench.alloc::<u8>(1000);
    bench.kernels.fill(&other, &mut memory, 1u8).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    let refused = bench.kernels.fill(&bench.stream, &mut memory, 2u8);
    assert!(matches!(refused, Err(KernelError::Order { kernel: "fill", .. })), "{refused:?}");
    drop(capture.end().unwrap());
    bench.kernels.fill(&bench.stream, &mut memory, 3u8).unwrap();
    assert_eq!(bench.download(&memory), [3; 1000]);
}

#[test]
fn spin_takes_the_given_time() {
    let bench = Bench::new();
    let spin = |ms| bench.kernels.spin(&bench.stream, Duration::from_millis(ms)).unwrap();
    let (start, end) = (bench.device.create_event(true).unwrap(), bench.device.create_event(true).unwrap());
    // A GPU loads the kernel at its first launch, and an event on an idle stream completes at once.
    // So launch once before, and then after work that hides the time of the host.
    spin(0);
    bench.stream.synchronize().unwrap();
    spin(5);
    start.record(&bench.stream).unwrap();
    spin(3);
    end.record(&bench.stream).unwrap();
    end.synchronize().unwrap();
    let ms = start.elapsed_ms(&end).unwrap();
    // A GPU's clock ticks every microsecond or so, and a tick may be missing.
    let least = if bench.is_simulated() { 3.0 } else { 2.99 };
    assert!((least..6.0).contains(&ms), "{ms}");
}

#[test]
fn a_graph_keeps_its_code_loaded() {
    let bench = Bench::new();
    let device = bench.device.clone();
    let kernels = Kernels::load(&device).unwrap();
    let mut memory = bench.alloc::<i32>(100);
    let capture = bench.stream.begin_capture().unwrap();
    kernels.fill(&bench.stream, &mut memory, 5).unwrap();
    let graph = capture.end().unwrap();
    let before = device.driver_calls();
    let unloaded = || device.driver_calls().since(&before).of(Operation::UnloadModule);
    drop(kernels);
    device.settle();
    assert_eq!(unloaded(), 0, "the graph may be launched");
    graph.launch(&bench.stream).unwrap();
    assert_eq!(bench.download(&memory), [5; 100]);
    drop(graph);
    device.settle();
    assert_eq!(unloaded(), aquifer_kernels::Module::ALL.len() as u64);
}

#[test]
fn modules_are_loaded_once_and_unloaded_with_the_last_handle() {
    let bench = Bench::new();
    let (device, modules) = (bench.device.clone(), aquifer_kernels::Module::ALL.len() as u64);
    let before = device.driver_calls();
    let kernels = Kernels::load(&device).unwrap();
    let again = kernels.clone();
    again.spin(&bench.stream, Duration::ZERO).unwrap();
    drop(kernels);
    drop(again);
    device.settle();
    let calls = device.driver_calls().since(&before);
    assert_eq!((calls.of(Operation::LoadModule), calls.of(Operation::UnloadModule)), (modules, modules));
}
