use std::cell::Cell;

use super::*;

const STREAM: u64 = 8;
const ADDRESS: u64 = 4096;

fn scene(call: &'static str) -> Scene {
    Scene::new(call, Form::Legacy, crate::stack::here())
}

/// The kinds of the findings, and the two calls.
fn found(judge: &Judge) -> Vec<[&'static str; 3]> {
    judge.findings.all()
}

fn fill(judge: &mut Judge) {
    judge.fill(&mut scene("cuMemsetD8Async"), ADDRESS, 64, STREAM, Moment::Late);
}

/// Captures on the stream. The graph has the handle 7.
fn capture(judge: &mut Judge, captured: impl FnOnce(&mut Judge)) {
    judge.take(&mut scene("cuStreamBeginCapture_v2"), Call::BeginCapture { stream: RawStream(STREAM) });
    captured(judge);
    judge.end_capture(&mut scene("cuStreamEndCapture"), STREAM, Some(&Cell::new(7)));
}

/// The simulated device gives no address out twice, so no program on it shows this.
#[test]
fn a_graph_is_stale_where_its_memory_is_another_allocations() {
    let mut judge = Judge::default();
    let alloc = |judge: &mut Judge| judge.alloc(&mut scene("cuMemAlloc_v2"), Some(&Cell::new(ADDRESS)), 64);
    let launch = |judge: &mut Judge| judge.launch_graph(&mut scene("cuGraphLaunch"), RawGraph(7), STREAM);
    alloc(&mut judge);
    capture(&mut judge, fill);
    launch(&mut judge);
    judge.free(&mut scene("cuMemFree_v2"), ADDRESS);
    alloc(&mut judge);
    assert!(found(&judge).is_empty(), "{judge:?}");
    launch(&mut judge);
    assert_eq!(found(&judge), [[STALE_GRAPH, "cuMemAlloc_v2", "cuMemsetD8Async"]]);
}

/// The simulated device refuses such a capture.
#[test]
fn a_launch_that_is_captured_does_not_run() {
    let mut judge = Judge::default();
    judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
    capture(&mut judge, fill);
    capture(&mut judge, |judge| judge.launch_graph(&mut scene("cuGraphLaunch"), RawGraph(7), STREAM));
    judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
    assert!(found(&judge).is_empty(), "{judge:?}");
}

#[test]
fn host_memory_may_be_used_at_the_address_of_pinned_memory_that_was_freed() {
    let mut judge = Judge::default();
    judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
    judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
    judge.alloc(&mut scene("cuMemAlloc_v2"), Some(&Cell::new(2 * ADDRESS)), 64);
    let pageable = host(usize::try_from(ADDRESS).unwrap_or(0));
    judge.copy(&mut scene("cuMemcpyHtoDAsync_v2"), device(2 * ADDRESS), pageable, 64, STREAM, Moment::Late);
    assert!(found(&judge).is_empty(), "{judge:?}");
}

#[test]
fn the_host_has_waited_after_a_copy_of_ordinary_memory_and_a_fill_of_pinned_memory() {
    for waits in [false, true] {
        let mut judge = Judge::default();
        judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
        judge.alloc(&mut scene("cuMemAlloc_v2"), Some(&Cell::new(2 * ADDRESS)), 64);
        let pinned = host(usize::try_from(ADDRESS).unwrap_or(0));
        judge.copy(&mut scene("cuMemcpyDtoHAsync_v2"), pinned, device(2 * ADDRESS), 64, 0, Moment::Late);
        if waits {
            judge.copy(&mut scene("cuMemcpyHtoD_v2"), device(2 * ADDRESS), host(64), 64, 0, Moment::Now);
        }
        judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
        assert_eq!(found(&judge).len(), usize::from(!waits), "{judge:?}");
        let mut judge = Judge::default();
        judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
        let moment = if waits { Moment::Now } else { Moment::Late };
        judge.fill(&mut scene("cuMemsetD8_v2"), ADDRESS, 64, 0, moment);
        judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
        assert_eq!(found(&judge).len(), usize::from(!waits), "{judge:?}");
    }
}

#[test]
fn stream_0_is_the_default_stream_of_the_calls_form() {
    for (form, findings) in [(Form::Legacy, 0), (Form::PerThread, 1)] {
        let mut judge = Judge::default();
        judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
        judge.fill(&mut scene("cuMemsetD8Async"), ADDRESS, 64, 0, Moment::Late);
        let wait = &mut Scene { form, ..scene("cuStreamSynchronize") };
        judge.take(wait, Call::StreamComplete { stream: RawStream(0) });
        judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
        assert_eq!(found(&judge).len(), findings, "{form:?}: {judge:?}");
    }
}

#[test]
fn waiting_for_the_legacy_stream_covers_blocking_streams() {
    for (flags, findings) in [(0, 0), (1, 1)] {
        let mut judge = Judge::default();
        judge.create_stream(&mut scene("cuStreamCreate"), Some(&Cell::new(STREAM)), flags);
        judge.page_lock(&mut scene("cuMemAllocHost_v2"), ADDRESS, 64, Family::Pinned);
        fill(&mut judge);
        judge.take(&mut scene("cuStreamSynchronize"), Call::StreamComplete { stream: RawStream(0) });
        judge.host_free(&mut scene("cuMemFreeHost"), ADDRESS);
        assert_eq!(found(&judge).len(), findings, "{judge:?}");
    }
}

#[test]
fn an_unmap_that_the_driver_refuses_takes_nothing_away() {
    for code in [0, INVALID_VALUE] {
        let mut judge = Judge::default();
        judge.create(&mut scene("cuMemCreate"), Some(&Cell::new(1)));
        judge.map(&mut scene("cuMemMap"), ADDRESS, 64, RawPhysical(1));
        capture(&mut judge, fill);
        judge.launch_graph(&mut scene("cuGraphLaunch"), RawGraph(7), STREAM);
        let unmap = &mut scene("cuMemUnmap");
        judge.unmap(unmap, ADDRESS, 64);
        unmap.code = code;
        if code != 0 {
            judge.undo_free(unmap);
        }
        judge.launch_graph(&mut scene("cuGraphLaunch"), RawGraph(7), STREAM);
        let kinds: Vec<&str> = found(&judge).into_iter().map(|[kind, ..]| kind).collect();
        let expected: &[&str] = if code == 0 { &[FREED_IN_USE, STALE_GRAPH] } else { &[] };
        assert!(kinds.len() == expected.len() && expected.iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
    }
}

#[test]
fn events_that_a_graph_waits_for_order_its_nodes_in_ways_that_are_not_known() {
    for (flags, findings) in [(0, 1), (1, 0)] {
        let mut judge = Judge::default();
        let other = STREAM + 8;
        judge.alloc(&mut scene("cuMemAlloc_v2"), Some(&Cell::new(ADDRESS)), 64);
        capture(&mut judge, |judge| {
            judge.wait(&mut scene("cuStreamWaitEvent"), STREAM, 9, flags);
            fill(judge);
        });
        judge.fill(&mut scene("cuMemsetD8Async"), ADDRESS, 64, other, Moment::Late);
        judge.record(&mut scene("cuEventRecord"), 9, other, 0);
        judge.launch_graph(&mut scene("cuGraphLaunch"), RawGraph(7), STREAM);
        assert_eq!(found(&judge).len(), findings, "{judge:?}");
    }
}
