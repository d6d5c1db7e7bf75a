//! Graphs of programs that begin captures with cudarc's function or the driver's: nothing announces
//! their ends, nor launches.
#![cfg(target_os = "linux")]

mod support;

use std::sync::Arc;
use std::thread;

use cudarc::driver::sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as THREAD_LOCAL,
};
use cudarc::driver::{CudaSlice, CudaStream, DriverError, sys};
use support::{FLAGS, Gpu, RELAXED, Raw, address, begin_raw, fill, filled, value_of};

const N: usize = 1 << 16;
const MIB: usize = 1 << 20;

/// Both ways to begin a capture whose end is not seen.
const WAYS: [fn(&Arc<CudaStream>); 2] = [|stream| stream.begin_capture(RELAXED).unwrap(), |stream| begin_raw(stream)];

/// Captures a copy of `input` to the output, by way of a temporary.
fn capture(begin: fn(&Arc<CudaStream>), stream: &Arc<CudaStream>, input: &CudaSlice<u8>) -> (Raw, CudaSlice<u8>) {
    begin(stream);
    let mut temporary = stream.alloc_zeros(input.len()).unwrap();
    stream.memcpy_dtod(input, &mut temporary).unwrap();
    let mut output = stream.alloc_zeros(input.len()).unwrap();
    stream.memcpy_dtod(&temporary, &mut output).unwrap();
    drop(temporary);
    let mut graph = Raw::end(stream).unwrap();
    graph.instantiate();
    (graph, output)
}

/// Slices that get all memory which is free, and whether they still have what was written there.
fn others(stream: &Arc<CudaStream>) -> Vec<CudaSlice<u8>> {
    (0..60).map(|_| filled(stream, N, 7)).collect()
}

fn assert_unharmed(others: &[CudaSlice<u8>]) {
    others.iter().for_each(|other| assert_eq!(value_of(other), 7));
}

#[test]
fn a_graph_whose_capture_the_driver_ended_keeps_its_memory_until_it_is_gone() {
    for begin in WAYS {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        let input = filled(&stream, N, 3);
        let graphs: Vec<_> = (0..3)
            .map(|_| {
                let captured = capture(begin, &stream, &input);
                drop(filled(&stream, N, 1));
                captured
            })
            .collect();
        for _ in 0..3 {
            let others = others(&stream);
            assert!(stream.alloc_zeros::<u8>(1 << 30).is_err());
            gpu.memory.empty_cache().unwrap();
            for (graph, output) in &graphs {
                graph.launch(&stream);
                assert_eq!(value_of(output), 3);
            }
            assert_unharmed(&others);
        }
        drop((graphs, input));
        gpu.assert_all_is_back();
    }
}

#[test]
fn a_capture_that_gives_no_graph_leaves_nothing_behind() {
    for begin in WAYS {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        for is_broken in [false, true, false] {
            begin(&stream);
            let slice = filled(&stream, N, 1);
            let lost = filled(&stream, N, 1);
            drop(slice);
            if is_broken {
                assert!(stream.synchronize().is_err());
            }
            // The graph that is not broken is destroyed at once.
            assert_eq!(Raw::end(&stream).err().is_some(), is_broken);
            stream.synchronize().unwrap();
            assert_eq!(value_of(&filled(&stream, N, 2)), 2);
            drop(lost);
            gpu.assert_all_is_back();
        }
    }
}

#[test]
fn slices_dropped_in_a_broken_capture_that_was_never_seen_are_served_again() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let slice = filled(&stream, N, 1);
    begin_raw(&stream);
    assert!(stream.synchronize().is_err());
    drop(slice);
    assert!(Raw::end(&stream).is_err());
    gpu.assert_all_is_back();
}

/// Calls before the first request of the capture.
#[test]
fn requests_elsewhere_do_not_break_a_capture_that_cudarc_begins() {
    for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
        for is_by_another_thread in [false, true] {
            let gpu = Gpu::new();
            let (stream, other) = (gpu.stream(), gpu.stream());
            let input = filled(&stream, N, 3);
            // Work on the memory of both is under way.
            let cached: Vec<_> = (0..30).map(|at| filled([&stream, &other][at % 2], 8 * MIB, 1)).collect();
            drop(cached);
            stream.begin_capture(mode).unwrap();
            let requests = || {
                assert!(other.alloc_zeros::<u8>(1 << 30).is_err());
                drop(other.alloc_zeros::<u8>(100 * MIB).unwrap());
                gpu.memory.empty_cache().unwrap();
                assert!(gpu.memory.device().synchronize().is_err(), "this would break the capture");
                gpu.context.trim().unwrap();
                gpu.context.mem_get_info().unwrap();
                drop(filled(&other, 8 * MIB, 2));
            };
            if is_by_another_thread {
                thread::scope(|scope| scope.spawn(requests).join()).unwrap();
            } else {
                requests();
            }
            let mut output = stream.alloc_zeros(N).unwrap();
            stream.memcpy_dtod(&input, &mut output).unwrap();
            requests();
            let graph = stream.end_capture(FLAGS).unwrap().unwrap();
            graph.launch().unwrap();
            assert_eq!(value_of(&output), 3);
            drop((graph, input, output));
            gpu.assert_all_is_back();
        }
    }
}

#[test]
fn captures_that_cudarc_begins_and_waits_of_other_threads_exclude_each_other() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let mut slice = filled(&stream, N, 1);
    thread::scope(|scope| {
        let captures = scope.spawn(|| {
            for _ in 0..100 {
                stream.begin_capture(GLOBAL).unwrap();
                (0..20).for_each(|value| fill(&stream, &mut slice, value));
                drop(Raw::end(&stream).unwrap());
            }
        });
        while !captures.is_finished() {
            drop(gpu.memory.device().synchronize());
        }
        captures.join().unwrap();
    });
    drop(slice);
    gpu.assert_all_is_back();
}

/// A capture without a request: its end is found out when a call needs that.
#[test]
fn captures_that_request_nothing_are_over_once_they_ended() {
    let gpu = Gpu::new();
    let (stream, other) = (gpu.stream(), gpu.stream());
    for _ in 0..3 {
        let slices: Vec<_> = (0..5).map(|_| filled(&other, 40 * MIB, 1)).collect();
        stream.begin_capture(GLOBAL).unwrap();
        drop(slices);
        drop(Raw::end(&stream).unwrap());
        // It moves memory.
        assert_eq!(value_of(&filled(&other, 200 * MIB, 2)), 2);
        gpu.assert_all_is_back();
    }
}

#[test]
fn a_graph_may_be_replaced_while_the_old_one_lives() {
    for begin in WAYS {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        let (one, two) = (filled(&stream, N, 1), filled(&stream, N, 2));
        let mut old = capture(begin, &stream, &one);
        for input in [&two, &one, &two] {
            let new = capture(begin, &stream, input);
            old.0.launch(&stream);
            new.0.launch(&stream);
            assert_ne!(value_of(&old.1), value_of(&new.1));
            old = new;
            gpu.standin.run_destructors();
            let others = others(&stream);
            old.0.launch(&stream);
            assert_unharmed(&others);
            assert_eq!(value_of(&old.1), value_of(input));
        }
        drop((old, one, two));
        gpu.assert_all_is_back();
    }
}

#[test]
fn clones_and_executables_keep_the_memory_of_a_graph() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let input = filled(&stream, N, 3);
    let (mut graph, output) = capture(WAYS[0], &stream, &input);
    let mut clone = graph.clone();
    clone.instantiate();
    graph.destroy_graph();
    let launch_and_check = |launched: &Raw| {
        gpu.standin.run_destructors();
        let others = others(&stream);
        launched.launch(&stream);
        assert_unharmed(&others);
        assert_eq!(value_of(&output), 3);
    };
    [&graph, &clone].into_iter().for_each(launch_and_check);
    drop(graph);
    clone.destroy_graph();
    launch_and_check(&clone);
    // A launch in flight keeps it, too: these slices are of another stream.
    let other = gpu.stream();
    clone.launch(&stream);
    drop(clone);
    let others = others(&other);
    stream.synchronize().unwrap();
    assert_unharmed(&others);
    drop((others, output, input));
    gpu.assert_all_is_back();
}

#[test]
fn a_destructor_that_runs_late_keeps_the_memory_as_long() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let input = filled(&stream, N, 3);
    gpu.standin.hold_destructors();
    let (graph, output) = capture(WAYS[1], &stream, &input);
    drop((graph, output));
    stream.synchronize().unwrap();
    gpu.memory.empty_cache().unwrap();
    let held = |gpu: &Gpu| gpu.memory.reserved_by_private_pools().values().sum::<u64>();
    assert!(held(&gpu) > 0, "the driver has not told that the graph is gone");
    gpu.standin.run_destructors();
    // A request finds it before it is refused, without a call that gives memory back.
    let rest = 256 * MIB - gpu.memory.memory_allocated() as usize - 16 * MIB;
    drop(stream.alloc_zeros::<u8>(rest).unwrap());
    assert_eq!(held(&gpu), 0);
    drop(input);
    gpu.assert_all_is_back();
}

/// Launches that nobody sees can neither be ordered nor bring memory back.
#[test]
fn graphs_share_no_memory_with_each_other() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let mut graphs = Vec::new();
    let mut expected = 0;
    for mib in [16, 8, 4, 2] {
        stream.begin_capture(RELAXED).unwrap();
        drop(filled(&stream, mib * MIB, 1));
        // Within a capture, the stream gets again what it freed.
        drop(filled(&stream, mib * MIB, 2));
        graphs.push(Raw::end(&stream).unwrap());
        expected += (mib * MIB) as u64;
        assert_eq!(gpu.memory.reserved_by_private_pools().values().sum::<u64>(), expected);
    }
    drop(graphs);
    gpu.assert_all_is_back();
}

#[test]
fn memory_dropped_in_a_capture_that_nobody_announced_is_the_graphs_until_it_is_gone() {
    for is_by_another_thread in [false, true] {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        let mut input = filled(&stream, N, 3);
        begin_raw(&stream);
        fill(&stream, &mut input, 5);
        if is_by_another_thread {
            // Which has no context.
            thread::spawn(|| drop(input)).join().unwrap();
        } else {
            drop(input);
        }
        let mut graph = Raw::end(&stream).unwrap();
        graph.instantiate();
        let others = others(&stream);
        graph.launch(&stream);
        assert_unharmed(&others);
        drop((graph, others));
        gpu.assert_all_is_back();
    }
}

#[test]
fn memory_of_a_capture_may_be_dropped_at_any_later_time_on_any_thread() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let input = filled(&stream, N, 3);
    let (graph, output) = capture(WAYS[1], &stream, &input);
    thread::spawn(|| drop(output)).join().unwrap();
    let others = others(&stream);
    graph.launch(&stream);
    assert_unharmed(&others);
    drop((graph, others, input));
    gpu.assert_all_is_back();
}

#[test]
fn streams_that_join_a_capture_get_memory_of_its_graph_and_none_that_another_freed() {
    for begin in WAYS {
        let gpu = Gpu::new();
        let (one, two) = (gpu.stream(), gpu.stream());
        begin(&one);
        let first = filled(&one, N, 1);
        let freed = address(&first);
        drop(first);
        two.join(&one).unwrap();
        let mut output = filled(&two, N, 3);
        assert_ne!(address(&output), freed, "nothing tells that the streams are ordered");
        fill(&two, &mut output, 4);
        let again = filled(&one, N, 2);
        assert_eq!(address(&again), freed);
        one.join(&two).unwrap();
        drop(again);
        let mut graph = Raw::end(&one).unwrap();
        graph.instantiate();
        for stream in [&one, &two] {
            let others = others(stream);
            graph.launch(stream);
            assert_unharmed(&others);
            stream.synchronize().unwrap();
            assert_eq!(value_of(&output), 4);
        }
        drop((graph, output));
        gpu.assert_all_is_back();
    }
}

#[test]
fn a_capture_ended_by_cudarc_may_have_begun_in_any_way() {
    for begin in WAYS {
        let gpu = Gpu::new();
        let stream = gpu.stream();
        let input = filled(&stream, N, 3);
        begin(&stream);
        let mut output = stream.alloc_zeros(input.len()).unwrap();
        stream.memcpy_dtod(&input, &mut output).unwrap();
        let graph = stream.end_capture(FLAGS).unwrap().unwrap();
        let others = others(&stream);
        graph.launch().unwrap();
        assert_unharmed(&others);
        assert_eq!(value_of(&output), 3);
        drop((graph, output, others, input));
        gpu.assert_all_is_back();
    }
}

#[test]
fn a_stream_that_captures_already_cannot_begin_once_more_and_goes_on() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    begin_raw(&stream);
    assert!(stream.begin_capture(RELAXED).is_err());
    let output = filled(&stream, N, 3);
    let mut graph = Raw::end(&stream).unwrap();
    graph.instantiate();
    graph.launch(&stream);
    assert_eq!(value_of(&output), 3);
    let nothing = stream.end_capture(FLAGS).err();
    assert!(matches!(nothing, Some(DriverError(code)) if code != sys::CUresult::CUDA_SUCCESS));
    drop((graph, output));
    gpu.assert_all_is_back();
}
