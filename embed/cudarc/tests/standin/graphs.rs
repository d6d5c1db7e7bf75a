//! Graphs that cudarc captures, with memory of Aquifer's.

use std::sync::{Arc, Barrier};
use std::thread;

use aquifer::buffer::{read, write};
use aquifer::memory::{Contents, Part, PoolOptions, SleepOptions};
use aquifer::{Allocator, Buffer};
use aquifer_cudarc::{AllocatorExt, Capture, Error, Graph, StreamExt};
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaStream, result};

use super::{Gpu, N};

const MODE: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const FLAGS: Flags = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

fn begin(gpu: &Gpu, stream: &Arc<CudaStream>) -> Capture<'static> {
    gpu.memory.begin_capture(stream, MODE).unwrap()
}

/// `y += x`.
fn add(gpu: &Gpu, on: &Arc<CudaStream>, y: &mut Buffer<f32>, x: &Buffer<f32>) {
    on.with([read(x), write(y)], |stream, [x, y]| gpu.launch(stream, y.device_ptr(), x.device_ptr(), 1.0)).unwrap();
}

fn zeros(gpu: &Gpu, on: &Arc<CudaStream>) -> Buffer<f32> {
    gpu.memory.alloc_zeros_on(N, on).unwrap()
}

fn first(buffer: &Buffer<f32>, on: &Arc<CudaStream>) -> f32 {
    let found = buffer.to_vec(&aquifer_cudarc::stream(on).unwrap()).unwrap();
    assert!(found.iter().all(|value| *value == found[0]), "{found:?}");
    found[0]
}

fn fill(buffer: &mut Buffer<f32>, value: f32, on: &Arc<CudaStream>) {
    buffer.fill(value, &aquifer_cudarc::stream(on).unwrap()).unwrap();
}

/// A graph that adds `x` to its output by way of a temporary, with the address of that.
fn capture(gpu: &Gpu, on: &Arc<CudaStream>, x: &Buffer<f32>) -> (Graph<Buffer<f32>>, u64) {
    let capture = begin(gpu, on);
    let mut temporary = zeros(gpu, on);
    add(gpu, on, &mut temporary, x);
    let mut output = zeros(gpu, on);
    add(gpu, on, &mut output, &temporary);
    let scratch = temporary.ptr().0;
    drop(temporary);
    (capture.end(FLAGS, output).unwrap(), scratch)
}

#[test]
fn launches_are_ordered_with_other_uses_of_the_buffers_whatever_the_stream() {
    for tracking in [true, false] {
        let gpu = if tracking { Gpu::new() } else { Gpu::new().without_tracking() };
        let [one, two, three] = gpu.streams();
        let mut x = zeros(&gpu, &two);
        let (graph, _) = capture(&gpu, &one, &x);
        for step in 0..20_u8 {
            fill(&mut x, f32::from(step), &two);
            if step % 2 == 0 { graph.launch() } else { graph.launch_on(&three) }.unwrap();
            // Overwritten with the launch in flight.
            fill(&mut x, -1.0, &two);
            assert_eq!(first(graph.graph().output(), &two), f32::from(step));
        }
        gpu.assert_no_violation();
    }
}

#[test]
fn memory_of_a_graph_is_given_to_nobody_else_as_long_as_it_lives() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    let mut x = zeros(&gpu, &one);
    fill(&mut x, 3.0, &one);
    let (graph, scratch) = capture(&gpu, &one, &x);
    let held: u64 = gpu.memory.reserved_by_private_pools().values().sum();
    assert!(held > 0);
    for _ in 0..10 {
        let mut others: Vec<_> = (0..20).map(|_| zeros(&gpu, &two)).collect();
        assert!(others.iter().all(|other| other.ptr().0 != scratch));
        others.iter_mut().for_each(|other| fill(other, 7.0, &two));
        // The ladder takes all that is unused.
        assert!(gpu.memory.alloc_on::<u8>(1 << 30, &two).unwrap_err().is_out_of_memory());
        gpu.memory.empty_cache().unwrap();
        graph.launch_on(&two).unwrap();
        assert!(others.iter().all(|other| first(other, &two) == 7.0));
        assert_eq!(first(graph.graph().output(), &one), 3.0);
    }
    drop((graph, x));
    gpu.context.synchronize().unwrap();
    gpu.memory.empty_cache().unwrap();
    assert_eq!((gpu.memory.memory_allocated(), gpu.memory.memory_reserved()), (0, 0), "{}", gpu.memory.summary());
    gpu.assert_no_violation();
}

#[test]
fn a_graph_keeps_the_buffers_of_its_work() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    let mut x = zeros(&gpu, &one);
    fill(&mut x, 5.0, &one);
    let (graph, _) = capture(&gpu, &one, &x);
    drop(x);
    let mut others: Vec<_> = (0..20).map(|_| zeros(&gpu, &one)).collect();
    others.iter_mut().for_each(|other| fill(other, 9.0, &one));
    graph.launch_on(&two).unwrap();
    assert_eq!(first(graph.graph().output(), &one), 5.0);
    gpu.assert_no_violation();
}

#[test]
fn a_capture_that_fails_leaves_nothing_behind() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let x = zeros(&gpu, &one);
    gpu.context.synchronize().unwrap();
    let left = |why: &str| {
        gpu.memory.empty_cache().unwrap();
        assert_eq!(gpu.memory.reserved_by_private_pools().values().sum::<u64>(), 0, "{why}");
        assert_eq!(gpu.memory.memory_allocated(), x.bytes(), "{why}");
    };
    let begun = begin(&gpu, &one);
    assert!(gpu.memory.begin_capture(&one, MODE).is_err(), "it captures already");
    let mut own = zeros(&gpu, &one);
    add(&gpu, &one, &mut own, &x);
    drop((begun, own));
    left("dropped");

    let begun = begin(&gpu, &one);
    let mut own = zeros(&gpu, &one);
    add(&gpu, &one, &mut own, &x);
    assert!(one.synchronize().is_err(), "this breaks the capture");
    let broken = begun.end(FLAGS, own).unwrap_err().to_string();
    assert!(broken.contains("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), "{broken}");
    left("broken");

    let begun = begin(&gpu, &one);
    let own = zeros(&gpu, &one);
    let flags = FLAGS | Flags::CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
    let refused = begun.end(flags, own).unwrap_err().to_string();
    assert!(refused.contains("cuStreamEndCapture"), "{refused}");
    left("not instantiated");

    let (graph, _) = capture(&gpu, &one, &x);
    graph.launch().unwrap();
    assert_eq!(first(graph.graph().output(), &one), 0.0);
    gpu.assert_no_violation();
}

#[test]
fn slices_of_a_capture_are_reused_in_it_and_live_on_as_its_output() {
    let gpu = Gpu::new().without_tracking();
    let [one] = gpu.streams();
    let slice = || gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
    assert!(matches!(gpu.memory.alloc_slice_zeros::<f32>(N, &one), Err(Error::Untracked)), "outside of captures");
    let x = gpu.memory.from_slice(&vec![2.0_f32; N], &aquifer_cudarc::stream(&one).unwrap()).unwrap();
    let begun = begin(&gpu, &one);
    let mut output = slice();
    let mut places = Vec::new();
    for _ in 0..10 {
        let mut temporary = slice();
        one.with([read(&x)], |one, [x]| one.memcpy_dtod(&*x.as_slice::<f32>(one)?, &mut *temporary)).unwrap();
        gpu.launch_slices(&one, &mut output, &temporary);
        places.push(cudarc::driver::DevicePtr::device_ptr(&*temporary, &one).0);
    }
    places.dedup();
    assert_eq!(places.len(), 1, "each is freed to the graph's pool");
    let graph = begun.end(FLAGS, output).unwrap();
    for _ in 0..3 {
        graph.launch().unwrap();
        assert_eq!(one.clone_dtoh(&**graph.graph().output()).unwrap(), vec![20.0; N]);
    }
    drop(graph);
    gpu.memory.empty_cache().unwrap();
    assert_eq!(gpu.memory.reserved_by_private_pools().values().sum::<u64>(), 0);
    gpu.assert_no_violation();
}

#[test]
fn a_slice_that_is_dropped_in_a_capture_is_kept_by_the_graph() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let mut kept = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
    one.memcpy_htod(&vec![4.0_f32; N], &mut *kept).unwrap();
    one.synchronize().unwrap();
    // SAFETY: one stream uses what is made from here on.
    unsafe { gpu.context.disable_event_tracking() };
    let before = gpu.memory.memory_allocated();
    let begun = begin(&gpu, &one);
    let mut output = zeros(&gpu, &one);
    one.with([write(&mut output)], |one, [output]| one.memcpy_dtod(&*kept, &mut *output.as_slice::<f32>(one)?))
        .unwrap();
    drop(kept);
    let graph = begun.end(FLAGS, output).unwrap();
    let mut others: Vec<_> = (0..20).map(|_| zeros(&gpu, &one)).collect();
    others.iter_mut().for_each(|other| fill(other, 9.0, &one));
    graph.launch().unwrap();
    assert_eq!(first(graph.graph().output(), &one), 4.0);
    drop((graph, others));
    assert_eq!(gpu.memory.memory_allocated(), before - 4 * N as u64);
    gpu.assert_no_violation();
}

#[test]
fn slices_that_a_graph_kept_go_back_although_another_stream_captures_when_the_graph_ends() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    let kept: Vec<_> = (0..50).map(|_| gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap()).collect();
    // SAFETY: one stream uses what is made from here on.
    unsafe { gpu.context.disable_event_tracking() };
    let begun = begin(&gpu, &one);
    drop(kept);
    let graph = begun.end(FLAGS, ()).unwrap();
    graph.launch().unwrap();
    let begun = begin(&gpu, &two);
    drop(graph);
    gpu.memory.device().settle();
    assert_eq!(gpu.memory.memory_allocated(), 50 * 4 * N as u64, "launches may run");
    begun.end(FLAGS, ()).unwrap();
    gpu.memory.device().settle();
    assert_eq!(gpu.memory.memory_allocated(), 0);
    gpu.assert_no_violation();
}

#[test]
fn a_slice_that_is_dropped_in_a_capture_of_another_library_stays_allocated() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let slice = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
    // SAFETY: one stream uses what is made from here on.
    unsafe { gpu.context.disable_event_tracking() };
    one.begin_capture(MODE).unwrap();
    let announced = aquifer_cudarc::stream(&one).unwrap().announce_capture().unwrap();
    drop(slice);
    assert!(one.end_capture(FLAGS).is_ok(), "nothing broke it");
    drop(announced);
    gpu.memory.device().settle();
    assert_eq!(gpu.memory.memory_allocated(), 4 * N as u64, "its launches are not seen");
    gpu.assert_no_violation();
}

#[test]
fn slices_that_cudarc_tracks_are_refused_in_a_capture() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let mut outside = zeros(&gpu, &one);
    gpu.context.synchronize().unwrap();
    let begun = begin(&gpu, &one);
    let refused = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap_err();
    assert!(matches!(refused, Error::TrackedCapture), "{refused}");
    let lent = one.with([write(&mut outside)], |one, [outside]| outside.as_slice::<f32>(one).map(drop));
    assert!(matches!(lent, Err(Error::TrackedCapture)), "{lent:?}");
    begun.end(FLAGS, ()).unwrap().launch().unwrap();
    gpu.assert_no_violation();
}

#[test]
fn a_capture_that_cudarc_began_by_itself_gets_memory_of_its_graphs_own() {
    let gpu = Gpu::new().without_tracking();
    let [one] = gpu.streams();
    let mut x = zeros(&gpu, &one);
    fill(&mut x, 3.0, &one);
    drop((zeros(&gpu, &one), zeros(&gpu, &one))); // which must not be given out again
    one.begin_capture(MODE).unwrap();
    let mut temporary = zeros(&gpu, &one);
    add(&gpu, &one, &mut temporary, &x);
    let mut slice = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
    let sum = gpu.memory.alloc_slice_zeros::<f32>(N, &one).unwrap();
    gpu.launch_slices(&one, &mut slice, &sum);
    let mut output = zeros(&gpu, &one);
    add(&gpu, &one, &mut output, &temporary);
    // The graph keeps buffers, its own memory, and memory from before.
    drop((x, temporary, slice, sum));
    let graph = one.end_capture(FLAGS).unwrap().unwrap();
    for _ in 0..3 {
        let mut others: Vec<_> = (0..20).map(|_| zeros(&gpu, &one)).collect();
        others.iter_mut().for_each(|other| fill(other, 7.0, &one));
        graph.launch().unwrap();
        assert!(others.iter().all(|other| first(other, &one) == 7.0));
        assert_eq!(first(&output, &one), 3.0);
    }
    drop((graph, output));
    gpu.assert_all_is_back();
}

/// What was kept for it goes at the next call that may take its memory back.
#[test]
fn a_graph_may_be_gone_when_a_part_of_memory_falls_asleep_or_wakes() {
    let gpu = Gpu::new().without_tracking();
    let [one] = gpu.streams();
    let pool = gpu.memory.create_pool(PoolOptions::default()).unwrap();
    let block = pool.alloc_bytes(8 << 20, &aquifer_cudarc::stream(&one).unwrap()).unwrap();
    let capture_and_drop = || {
        one.begin_capture(MODE).unwrap();
        drop(zeros(&gpu, &one));
        drop(one.end_capture(FLAGS).unwrap());
        gpu.standin.run_destructors();
    };
    capture_and_drop();
    gpu.memory.sleep(SleepOptions::part(Part::pool(&pool), Contents::SaveToHost)).unwrap();
    capture_and_drop();
    gpu.memory.wake().unwrap();
    capture_and_drop();
    gpu.memory.sleep(Contents::SaveToHost).unwrap();
    gpu.memory.wake().unwrap();
    drop((block, pool));
    gpu.assert_all_is_back();
}

#[test]
fn a_slice_of_another_allocator_that_is_dropped_in_a_capture_goes_with_the_graph() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let other = Allocator::new(gpu.memory.device(), "").unwrap();
    let slice = other.alloc_slice_zeros::<f32>(N, &one).unwrap();
    let gpu = gpu.without_tracking();
    one.begin_capture(MODE).unwrap();
    drop(zeros(&gpu, &one));
    drop(slice);
    let graph = one.end_capture(FLAGS).unwrap().unwrap();
    gpu.context.synchronize().unwrap();
    assert!(other.memory_allocated() > 0, "the graph may use it");
    drop(graph);
    gpu.assert_all_is_back();
    assert_eq!(other.memory_allocated(), 0);
}

#[test]
fn threads_that_see_a_capture_first_at_the_same_time_share_its_memory() {
    let gpu = Gpu::new().without_tracking();
    let [one] = gpu.streams();
    let starts = Barrier::new(2);
    for _ in 0..100 {
        gpu.context.bind_to_thread().unwrap();
        // SAFETY: the stream lives.
        unsafe { result::stream::begin_capture(one.cu_stream(), Mode::CU_STREAM_CAPTURE_MODE_RELAXED) }.unwrap();
        let allocate = || {
            starts.wait();
            let graph = aquifer_cudarc::graph_of_capture(&gpu.memory, &one).unwrap().unwrap();
            drop(zeros(&gpu, &one));
            graph
        };
        let [first, second] = thread::scope(|threads| {
            let both = [(); 2].map(|()| threads.spawn(allocate));
            both.map(|thread| thread.join().unwrap())
        });
        assert!(Arc::ptr_eq(&first, &second));
        // SAFETY: the stream lives, and the graph is destroyed once.
        let captured = unsafe { result::stream::end_capture(one.cu_stream()) }.unwrap();
        // SAFETY: as above, and nothing else has the graph.
        unsafe { result::graph::destroy(captured) }.unwrap();
        gpu.standin.run_destructors();
    }
    gpu.assert_all_is_back();
}

#[test]
fn a_capture_forks_by_joins_of_cudarcs() {
    let gpu = Gpu::new().without_tracking();
    let [one, two] = gpu.streams();
    let mut x = zeros(&gpu, &one);
    fill(&mut x, 3.0, &one);
    let capture = begin(&gpu, &one);
    let mut on_one = zeros(&gpu, &one);
    add(&gpu, &one, &mut on_one, &x);
    let mut output = zeros(&gpu, &one);
    let refused = two.with([read(&on_one), write(&mut output)], |_, _| Ok::<_, Error>(())).unwrap_err();
    assert!(refused.to_string().contains("join"), "{refused}");
    two.join(&one).unwrap();
    add(&gpu, &two, &mut output, &on_one);
    one.join(&two).unwrap();
    add(&gpu, &one, &mut output, &x);
    drop((on_one, x));
    let graph = capture.end(FLAGS, output).unwrap();
    for on in [&one, &two, &one] {
        graph.launch_on(on).unwrap();
        assert_eq!(first(graph.graph().output(), on), 6.0);
    }
    gpu.assert_no_violation();
}

#[test]
fn graphs_of_one_pool_share_its_memory_and_keep_none_of_it() {
    let gpu = Gpu::new();
    let [one, two] = gpu.streams();
    let pool = gpu.memory.create_pool(Default::default()).unwrap();
    let x = gpu.memory.from_slice(&vec![1.0_f32; N], &aquifer_cudarc::stream(&one).unwrap()).unwrap();
    let held = |memory: &Allocator| memory.reserved_by_private_pools().values().sum::<u64>();
    let mut outputs = [zeros(&gpu, &one), zeros(&gpu, &one)];
    gpu.context.synchronize().unwrap();
    let mut after_first = 0;
    let graphs: Vec<Graph> = outputs
        .iter_mut()
        .zip([&one, &two])
        .map(|(output, on)| {
            let begun = gpu.memory.begin_capture_in(&pool, on, MODE).unwrap();
            let mut temporary = zeros(&gpu, on);
            add(&gpu, on, &mut temporary, &x);
            add(&gpu, on, output, &temporary);
            drop(temporary);
            let graph = begun.end(FLAGS, ()).unwrap();
            after_first = after_first.max(held(&gpu.memory));
            assert_eq!(held(&gpu.memory), after_first);
            graph
        })
        .collect();
    for graph in graphs.iter().cycle().take(10) {
        graph.launch().unwrap();
    }
    assert_eq!(outputs.map(|output| first(&output, &one)), [5.0, 5.0]);
    let begun = gpu.memory.begin_capture_in(&pool, &one, MODE).unwrap();
    let left = zeros(&gpu, &one);
    let refused = begun.end(FLAGS, left).unwrap_err();
    assert!(matches!(refused, Error::Aquifer(aquifer::Error::UnevenWork { .. })), "{refused}");
    gpu.assert_no_violation();
}

#[test]
fn a_graph_is_launched_by_any_thread_and_looked_at_as_cudarc_has_it() {
    let gpu = Gpu::new();
    let [one] = gpu.streams();
    let x = gpu.memory.from_slice(&vec![1.0_f32; N], &aquifer_cudarc::stream(&one).unwrap()).unwrap();
    let (graph, _) = capture(&gpu, &one, &x);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..10).for_each(|_| graph.launch().unwrap()));
        }
    });
    graph.with_cuda_graph(|theirs| theirs.upload()).unwrap();
    assert_eq!(first(graph.graph().output(), &one), 1.0);
    gpu.memory.sleep(SleepOptions::all(Contents::SaveToHost)).unwrap();
    let asleep = graph.launch().unwrap_err();
    assert!(matches!(&asleep, Error::Aquifer(error) if error.is_asleep()), "{asleep}");
    gpu.memory.wake().unwrap();
    graph.launch().unwrap();
    assert_eq!(first(graph.graph().output(), &one), 1.0);
    gpu.assert_no_violation();
}

#[test]
fn slices_dropped_in_a_capture_that_nobody_announced_stay_the_graphs() {
    for has_several_streams in [false, true] {
        let tracked = Gpu::new();
        let stream = match has_several_streams {
            true => tracked.streams::<1>()[0].clone(),
            false => tracked.context.per_thread_stream(),
        };
        let mut y = tracked.memory.alloc_slice_zeros::<f32>(N, &stream).unwrap();
        let x = tracked.memory.alloc_slice_zeros::<f32>(N, &stream).unwrap();
        stream.synchronize().unwrap();
        let gpu = tracked.without_tracking();
        stream.begin_capture(MODE).unwrap();
        gpu.launch_slices(&stream, &mut y, &x);
        drop((x, y));
        let graph = stream.end_capture(FLAGS).unwrap().unwrap();
        assert!(gpu.memory.memory_allocated() >= 2 * 4 * N as u64);
        if has_several_streams {
            // Untracked slices are refused.
            graph.launch().unwrap();
            drop(graph);
            gpu.assert_all_is_back();
            continue;
        }
        let mut others: Vec<_> = (0..4).map(|_| gpu.memory.alloc_slice_zeros::<f32>(N, &stream).unwrap()).collect();
        others.iter_mut().for_each(|other| stream.memcpy_htod(&vec![7.0_f32; N], &mut **other).unwrap());
        graph.launch().unwrap();
        for other in &others {
            assert!(stream.clone_dtoh(&**other).unwrap().iter().all(|value| *value == 7.0));
        }
        drop((graph, others));
        gpu.assert_all_is_back();
    }
}
