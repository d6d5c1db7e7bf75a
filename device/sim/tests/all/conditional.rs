//! Conditional nodes: which body runs, what bodies are ordered with, and what is refused.

use aquifer_device::{Code, DevicePtr, Driver, ErrorKind, RawGraph, RawStream};
use aquifer_sim::{Conditional, SimDriver, ViolationKind};

use crate::common::{MIB, Short, code, device};

/// Captures a node on `stream`, whose bodies `work` captures on `side`.
fn node(
    driver: &SimDriver,
    (kind, bodies): (Conditional, u32),
    [stream, side]: [RawStream; 2],
    work: impl Fn(u32),
) -> u64 {
    let node = driver.add_conditional(stream, kind, bodies, 0).unwrap();
    driver.come_after_conditional(stream, node).unwrap();
    for body in 0..bodies {
        driver.begin_body(node, body, side).unwrap();
        work(body);
        driver.end_body(side).unwrap();
    }
    node
}

/// A graph that fills memory with 9, then with the number of the body that runs and 1.
fn graph(driver: &SimDriver, kind: (Conditional, u32), memory: DevicePtr) -> (RawGraph, u64, RawStream) {
    let streams = [driver.stream(), driver.stream()];
    driver.begin_capture(streams[0]).unwrap();
    driver.memset(memory, 9, MIB, streams[0]).unwrap();
    let body = |body: u32| driver.memset(memory, u8::try_from(body).unwrap() + 1, MIB, streams[1]).unwrap();
    let node = node(driver, kind, streams, body);
    (driver.end_capture(streams[0]).unwrap(), node, streams[0])
}

#[test]
fn a_launch_runs_the_body_that_the_condition_names() {
    let expected = |kind, condition| match (kind, condition) {
        ((Conditional::If, _), 1..) => 1,
        ((Conditional::If, 2), 0) => 2,
        ((Conditional::Switch, bodies), body) if body < bodies => u8::try_from(body).unwrap() + 1,
        _ => 9,
    };
    for kind in [(Conditional::If, 1), (Conditional::If, 2), (Conditional::Switch, 1), (Conditional::Switch, 4)] {
        let driver = device(0);
        let memory = driver.alloc(MIB).unwrap();
        let (graph, node, stream) = graph(&driver, kind, memory);
        assert_eq!(driver.graph_len(graph), Some(2), "the fill and the node");
        for condition in [3, 0, 1, 4, 2] {
            driver.set_condition(node, condition).unwrap();
            driver.launch_graph(graph, stream).unwrap();
            let found = driver.get(memory, 1, stream).unwrap();
            assert_eq!(found, [expected(kind, condition)], "{kind:?}, {condition}");
        }
        driver.destroy_graph(graph).unwrap();
        assert_eq!(code(driver.set_condition(node, 0)), Code::INVALID_HANDLE);
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn a_copy_of_a_graph_keeps_its_nodes() {
    let driver = device(0);
    let memory = driver.alloc(MIB).unwrap();
    let (graph, node, stream) = graph(&driver, (Conditional::Switch, 2), memory);
    let copy = driver.copy_graph(graph, false).unwrap();
    driver.destroy_graph(graph).unwrap();
    driver.set_condition(node, 1).unwrap();
    driver.launch_graph(copy, stream).unwrap();
    assert_eq!(driver.get(memory, 1, stream).unwrap(), [2]);
}

#[test]
fn bodies_within_bodies_run_if_all_around_them_do() {
    let driver = device(0);
    let ([stream, side, inner], memory) = ([(); 3].map(|()| driver.stream()), driver.alloc(MIB).unwrap());
    driver.memset(memory, 9, MIB, stream).unwrap();
    driver.begin_capture(stream).unwrap();
    let nested = std::cell::Cell::new(0);
    let outer = node(&driver, (Conditional::If, 1), [stream, side], |_| {
        let fill = |body: u32| driver.memset(memory, u8::try_from(body).unwrap(), MIB, inner).unwrap();
        nested.set(node(&driver, (Conditional::Switch, 2), [side, inner], fill));
    });
    let graph = driver.end_capture(stream).unwrap();
    for (conditions, expected) in [([0, 1], 9), ([1, 1], 1), ([1, 0], 0), ([1, 2], 0), ([0, 1], 0)] {
        driver.set_condition(outer, conditions[0]).unwrap();
        driver.set_condition(nested.get(), conditions[1]).unwrap();
        driver.launch_graph(graph, stream).unwrap();
        assert_eq!(driver.get(memory, 1, stream).unwrap(), [expected], "{conditions:?}");
    }
    assert_eq!((driver.graph_len(graph), driver.violations()), (Some(1), vec![]));
}

/// What runs on `other` is beside the node: before it, after it, or neither.
#[test]
fn bodies_race_with_what_the_node_is_not_ordered_with_and_not_with_each_other() {
    for (before, after, races) in [(true, false, false), (false, true, false), (false, false, true)] {
        let driver = device(0);
        let (streams, other) = ([driver.stream(), driver.stream()], driver.stream());
        let memory = driver.alloc(MIB).unwrap();
        driver.begin_capture(streams[0]).unwrap();
        driver.order(streams[0], other);
        if before {
            driver.memset(memory, 1, MIB, other).unwrap();
            driver.order(other, streams[0]);
        }
        node(&driver, (Conditional::Switch, 3), streams, |_| driver.memset(memory, 2, MIB, streams[1]).unwrap());
        if after {
            driver.order(streams[0], other);
        }
        if !before {
            driver.memset(memory, 3, MIB, other).unwrap();
            driver.order(other, streams[0]);
        }
        driver.memset(memory, 4, MIB, streams[0]).unwrap();
        driver.end_capture(streams[0]).unwrap();
        let found: Vec<_> = driver.violations().iter().map(|violation| violation.kind).collect();
        assert_eq!(found, vec![ViolationKind::WriteWrite; usize::from(races)], "{before} {after}");
    }
}

#[test]
fn work_that_is_not_put_behind_the_node_races_with_its_bodies() {
    let driver = device(0);
    let ([stream, side], memory) = ([driver.stream(), driver.stream()], driver.alloc(MIB).unwrap());
    driver.begin_capture(stream).unwrap();
    let node = driver.add_conditional(stream, Conditional::If, 1, 1).unwrap();
    driver.begin_body(node, 0, side).unwrap();
    driver.memset(memory, 1, MIB, side).unwrap();
    driver.end_body(side).unwrap();
    driver.memset(memory, 2, MIB, stream).unwrap();
    driver.end_capture(stream).unwrap();
    assert_eq!(driver.violations()[0].kind, ViolationKind::WriteWrite);
}

#[test]
fn races_of_streams_within_a_body_are_found() {
    for joins_before in [true, false] {
        let driver = device(0);
        let ([stream, side], other) = ([driver.stream(), driver.stream()], driver.stream());
        let memory = driver.alloc(MIB).unwrap();
        driver.begin_capture(stream).unwrap();
        // The same streams take part in both bodies.
        node(&driver, (Conditional::Switch, 2), [stream, side], |_| {
            driver.order(side, other);
            driver.memset(memory, 1, MIB, other).unwrap();
            if joins_before {
                driver.order(other, side);
            }
            driver.memset(memory, 2, MIB, side).unwrap();
            driver.order(other, side);
        });
        driver.end_capture(stream).unwrap();
        assert_eq!(driver.violations().len(), if joins_before { 0 } else { 2 });
    }
}

#[test]
fn nodes_and_bodies_that_cannot_be_are_refused() {
    let driver = device(0);
    let (stream, side, memory) = (driver.stream(), driver.stream(), driver.alloc(MIB).unwrap());
    let add = |kind, bodies| driver.add_conditional(stream, kind, bodies, 0);
    assert_eq!(code(add(Conditional::If, 1)), Code::INVALID_VALUE, "the stream does not capture");
    driver.begin_capture(stream).unwrap();
    let error = add(Conditional::While, 1).unwrap_err();
    assert_eq!(error.code, Code::NOT_SUPPORTED);
    assert!(error.to_string().contains("nodes that run a body again are not supported"), "{error}");
    assert_eq!([code(add(Conditional::If, 3)), code(add(Conditional::Switch, 0))], [Code::INVALID_VALUE; 2]);
    let node = add(Conditional::Switch, 3).unwrap();
    assert_eq!(code(driver.begin_body(node, 3, side)), Code::INVALID_VALUE, "there is no such body");
    assert_eq!(code(driver.begin_body(node + 1, 0, side)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.begin_body(node, 0, RawStream::LEGACY)), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(code(driver.begin_body(node, 0, stream)), Code::CAPTURE_UNSUPPORTED, "it captures");
    driver.begin_body(node, 0, side).unwrap();
    assert_eq!(code(driver.begin_body(node, 1, driver.stream())), Code::INVALID_VALUE, "one at a time");
    assert_eq!(code(driver.end_body(stream)), Code::INVALID_VALUE, "it captures no body");
    assert_eq!(code(driver.end_capture(side)), Code::INVALID_VALUE);
    driver.end_body(side).unwrap();
    assert_eq!(code(driver.begin_body(node, 0, side)), Code::INVALID_VALUE, "it is captured already");
    driver.come_after_conditional(stream, node).unwrap();
    driver.memset(memory, 1, MIB, stream).unwrap();
    assert_eq!(code(driver.begin_body(node, 1, side)), Code::NOT_SUPPORTED, "work comes after the node");
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(code(driver.begin_body(node, 1, side)), Code::INVALID_VALUE, "the capture is over");
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(driver.get(memory, 1, stream).unwrap(), [1]);
}

#[test]
fn a_body_that_breaks_breaks_the_capture_around_it() {
    type Break = fn(&SimDriver, RawStream) -> Code;
    let breaks: [Break; 3] = [
        |driver, side| code(driver.synchronize_stream(side)),
        |driver, side| code(driver.alloc_async(MIB, side)),
        |driver, side| {
            let other = driver.stream();
            driver.order(side, other);
            driver.memset(driver.alloc(MIB).unwrap(), 1, MIB, other).unwrap();
            Code::CAPTURE_UNSUPPORTED
        },
    ];
    for breaks in breaks {
        let driver = device(0);
        let (stream, side) = (driver.stream(), driver.stream());
        driver.begin_capture(stream).unwrap();
        let node = driver.add_conditional(stream, Conditional::If, 1, 1).unwrap();
        driver.begin_body(node, 0, side).unwrap();
        assert_eq!(breaks(&driver, side), Code::CAPTURE_UNSUPPORTED);
        assert_eq!(driver.end_body(side).unwrap_err().kind, ErrorKind::Capture);
        assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_INVALIDATED);
        assert_eq!(driver.live_objects().captures, 0);
        driver.synchronize().unwrap();
    }
}

#[test]
fn a_capture_does_not_end_before_its_bodies() {
    let driver = device(0);
    let (stream, side) = (driver.stream(), driver.stream());
    driver.begin_capture(stream).unwrap();
    let node = driver.add_conditional(stream, Conditional::If, 1, 1).unwrap();
    driver.begin_body(node, 0, side).unwrap();
    assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_UNJOINED);
    assert_eq!(code(driver.end_body(side)), Code::INVALID_VALUE, "it is gone, too");
    assert_eq!(driver.live_objects().captures, 0);
}
