//! Captures and launches of graphs.

use aquifer_oracle::RaceKind::Work;

use crate::bench::{BYTES, Bench, GRANULE, LEGACY};

#[test]
fn captured_work_does_not_run() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.write(bench.free[1]);
    bench.both.end_capture(bench.free[0]).unwrap();
    bench.races_nowhere();
}

#[test]
fn a_launch_is_work_of_its_stream() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.launch_graph(graph, bench.blocking[0]).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.assert_found(&[]);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.races(Work);
}

#[test]
fn what_a_stream_did_before_its_capture_does_not_order_the_graph() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.read(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn launches_of_one_graph_wait_for_each_other() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.fill(bench.other, bench.free[0]);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn launches_of_two_graphs_do_not_wait_for_each_other() {
    let bench = Bench::new();
    let graphs = bench.free.map(|stream| {
        bench.both.begin_capture(stream).unwrap();
        bench.write(stream);
        bench.both.end_capture(stream).unwrap()
    });
    bench.both.launch_graph(graphs[0], bench.free[0]).unwrap();
    bench.both.launch_graph(graphs[1], bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn events_order_the_streams_of_a_capture() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.free[1]);
    bench.write(bench.free[1]);
    bench.order(bench.free[1], bench.free[0]);
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.races_nowhere();
}

#[test]
fn branches_of_a_capture_race() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.order(bench.free[0], bench.free[1]);
    bench.read(bench.free[1]);
    bench.write(bench.free[0]);
    bench.races(Work);
}

#[test]
fn a_launch_uses_the_memory_behind_its_addresses_by_then() {
    let bench = Bench::new();
    let (one, two) = (bench.addresses(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(one, first);
    bench.map(two, second);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.fill(two, bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.fill(one, bench.free[0]);
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, first);
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn branches_race_if_their_addresses_become_one_memory() {
    let bench = Bench::new();
    let (one, two) = (bench.addresses(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(one, first);
    bench.map(two, second);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.order(bench.free[0], bench.free[1]);
    bench.fill(one, bench.free[0]);
    bench.fill(two, bench.free[1]);
    bench.order(bench.free[1], bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, first);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.races(Work);
}

#[test]
fn a_broken_capture_records_nothing() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.blocking[0]).unwrap();
    bench.both.memset(bench.memory, 1, BYTES, LEGACY).unwrap_err();
    bench.both.end_capture(bench.blocking[0]).unwrap_err();
    bench.write(bench.blocking[0]);
    bench.write(bench.blocking[1]);
    bench.races(Work);
}
