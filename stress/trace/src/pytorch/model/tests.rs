//! The model step by step, with failing drivers, and with random programs that lack memory.

use aquifer::device::sim::{SimConfig, SimDriver};

use super::*;
use crate::observe::Lagged;
use crate::pytorch::pages::PAGES;
use crate::random::Random;

const MIB: u64 = 1 << 20;

fn model(device: &str, config: &str, lag: u64) -> PyTorch {
    let (options, config) = Options::parse_model(config).unwrap().unwrap();
    let sim = SimConfig::parse(device.strip_prefix("sim:").unwrap()).unwrap();
    let (device, lag) = if lag > 0 {
        let lagged = Lagged::new(sim, lag);
        (lagged.device, Some(lagged.lag))
    } else {
        (Device::new(SimDriver::new(sim)), None)
    };
    let memory = device.memory_info().unwrap();
    PyTorch::new(&device, options, config.limit_bytes(memory.total, memory.free), 2, lag).unwrap()
}

fn native(device: &str, options: &str, lag: u64) -> PyTorch {
    model(device, &format!("backing:pytorch{options}"), lag)
}

fn expandable(device: &str) -> PyTorch {
    model(device, "backing:expandable", 0)
}

fn reserved(subject: &PyTorch) -> u64 {
    subject.stats().reserved_bytes.all.current / MIB
}

#[test]
fn a_block_that_another_stream_uses_is_free_once_its_event_is_complete() {
    let mut subject = native("sim:64MiB", "", 3);
    let use_and_free = |subject: &mut PyTorch| {
        subject.begin_event();
        let mut block = subject.alloc(30 * MIB, 0).unwrap();
        subject.record_stream(&mut block, 1).unwrap();
        subject.record_stream(&mut block, 0).unwrap();
        subject.free(block);
    };
    use_and_free(&mut subject);
    use_and_free(&mut subject);
    assert_eq!((reserved(&subject), subject.pending_events), (60, 2), "the first one is not done");
    (0..3).for_each(|_| subject.begin_event());
    let third = subject.alloc(30 * MIB, 0).unwrap();
    assert_eq!((reserved(&subject), subject.pending_events), (60, 0));
    subject.free(third);
    use_and_free(&mut subject);
    // Memory is short: the host waits.
    let large = subject.alloc(62 * MIB, 0).unwrap();
    assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (62, 1));
    subject.free(large);
    subject.empty_cache().unwrap();
    assert_eq!(reserved(&subject), 0);
}

#[test]
fn segments_of_average_age_and_more_are_released_above_the_threshold() {
    let mut subject = native("sim:100MiB", ",garbage_collection_threshold:0.5,limit_mb:90", 0);
    let blocks = [20, 22, 24].map(|mib| subject.alloc(mib * MIB, 0).unwrap());
    blocks.into_iter().for_each(|block| subject.free(block));
    let again = subject.alloc(24 * MIB, 0).unwrap();
    assert_eq!(reserved(&subject), 66);
    // The two free ones are of the same age.
    let new = subject.alloc(30 * MIB, 0).unwrap();
    assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (54, 0));
    [again, new].into_iter().for_each(|block| subject.free(block));
}

#[test]
fn oversize_segments_are_released_for_an_oversize_request_and_others_stay() {
    let mut subject = native("sim:200MiB", ",max_split_size_mb:40", 0);
    let blocks = [30, 40, 60, 44].map(|mib| subject.alloc(mib * MIB, 0).unwrap());
    blocks.into_iter().for_each(|block| subject.free(block));
    let one = subject.alloc(90 * MIB, 0).unwrap();
    // 60 and 44 MiB were released, the largest ones.
    assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (160, 0));
    assert!(matches!(subject.alloc(150 * MIB, 0), Err(Refused::OutOfMemory(_))));
    assert_eq!((reserved(&subject), subject.stats().num_ooms), (90, 1));
    subject.free(one);
}

#[test]
fn a_limit_refuses_without_a_retry_if_so_asked() {
    for (options, retries) in [("", 1), (",throw_on_cudamalloc_oom:True", 0)] {
        let mut subject = native("sim:1GiB", &format!(",limit_mb:50{options}"), 0);
        assert!(matches!(subject.alloc(51 * MIB, 0), Err(Refused::OutOfMemory(_))));
        let stats = subject.stats();
        assert_eq!((stats.num_alloc_retries, stats.num_ooms, stats.num_oom_rejections), (retries, 1, 1 - retries));
        assert!(matches!(subject.alloc(u64::MAX, 0), Err(Refused::OutOfMemory(_))));
    }
}

#[test]
fn segments_go_back_whichever_driver_call_fails() {
    for call in ["cuMemAlloc#2", "cuMemFree#1", "cuEventCreate#1", "cuEventRecord#1", "cuEventQuery#1"] {
        let mut subject = native(&format!("sim:1GiB,fault={call}:999"), "", 0);
        let mut failed = 0;
        for bytes in [30 * MIB, 100 * MIB, 30 * MIB] {
            match subject.alloc(bytes, 0) {
                Ok(mut block) => {
                    subject.record_stream(&mut block, 1).unwrap();
                    subject.free(block);
                }
                Err(_) => failed += 1,
            }
        }
        failed += usize::from(subject.empty_cache().is_err());
        assert_eq!(failed, 1, "{call}");
        let device = subject.device.clone();
        drop(subject);
        assert_eq!(device.memory_info().unwrap().free, 1 << 30, "{call}");
    }
}

#[test]
fn a_segment_grows_by_pages_of_its_pool() {
    let mut subject = expandable("sim:1GiB");
    let small = subject.alloc(1000, 0).unwrap();
    assert_eq!((subject.held().0, subject.stats().allocated_bytes.all.current), (2 * MIB, 1024));
    let large = subject.alloc(MIB + 1, 0).unwrap();
    assert_eq!(subject.held().0, 22 * MIB);
    let grown = subject.alloc(30 * MIB, 0).unwrap();
    assert_eq!(subject.held().0, 42 * MIB, "it begins in the free part of the last page");
    let other_stream = subject.alloc(MIB, 1).unwrap();
    assert_eq!(subject.held().0, 44 * MIB);
    [small, large, grown, other_stream].into_iter().for_each(|block| subject.free(block));
    assert_eq!(subject.held().0, 44 * MIB);
    subject.empty_cache().unwrap();
    assert_eq!(subject.held().0, 0);
    assert_eq!(subject.device.memory_info().unwrap().free, 1 << 30);
}

#[test]
fn free_pages_are_released_once_before_a_refusal() {
    let mut subject = expandable("sim:100MiB");
    let blocks = [(); 4].map(|()| subject.alloc(20 * MIB, 0).unwrap());
    let [one, two, three, four] = blocks;
    subject.free(one);
    subject.free(three);
    // Neither of the two holes is long enough, but their pages serve at the segment's end.
    let moved = subject.alloc(60 * MIB, 0).unwrap();
    assert_eq!((subject.held().0, subject.stats().num_alloc_retries), (100 * MIB, 1));
    assert!(matches!(subject.alloc(20 * MIB, 0), Err(Refused::OutOfMemory(_))));
    assert_eq!((subject.stats().num_alloc_retries, subject.stats().num_ooms), (2, 1));
    [two, four, moved].into_iter().for_each(|block| subject.free(block));
    let device = subject.device.clone();
    drop(subject);
    assert_eq!(device.memory_info().unwrap().free, 100 * MIB);
    device.assert_no_violations();
}

#[test]
fn pages_go_back_whichever_driver_call_fails() {
    for call in ["cuMemCreate#2", "cuMemMap#2", "cuMemSetAccess#2", "cuMemUnmap#2", "cuMemRelease#2"] {
        let mut subject = expandable(&format!("sim:1GiB,fault={call}:999"));
        let mut failed = 0;
        for bytes in [30 * MIB, 100 * MIB] {
            match subject.alloc(bytes, 0) {
                Ok(block) => subject.free(block),
                Err(_) => failed += 1,
            }
        }
        failed += usize::from(subject.empty_cache().is_err());
        // What cannot be released now is released later.
        assert_eq!(failed, usize::from(!call.starts_with("cuMemRelease")), "{call}");
        let device = subject.device.clone();
        drop(subject);
        device.settle();
        assert_eq!(device.memory_info().unwrap().free, 1 << 30, "{call}");
    }
}

#[test]
fn requests_larger_than_the_device_are_refused() {
    let mut subject = expandable("sim:1GiB");
    for bytes in [(1 << 30) + 1, u64::MAX] {
        assert!(matches!(subject.alloc(bytes, 0), Err(Refused::OutOfMemory(_))));
    }
    assert!(subject.segments.is_empty() && subject.alloc(0, 0).unwrap().is_none());
}

/// Blocks tile their segments, neighbours in the same state are merged, and the indexes have the
/// free and the unmapped blocks.
fn assert_consistent(subject: &PyTorch) {
    let (mut held, mut live, mut free, mut unmapped) = (0, 0, Vec::new(), Vec::new());
    for (&start, segment) in &subject.segments {
        let (mut id, mut prev, mut at) = (segment.first, NONE, start);
        while id != NONE {
            let block = subject.blocks[id as usize];
            assert_eq!((block.place, block.prev), (at, prev));
            let merges = |id: u32| match subject.blocks.get(id as usize) {
                Some(Block { state: state @ (State::Free | State::Unmapped), .. }) => Some(*state),
                _ => None,
            };
            assert!(merges(id).is_none() || merges(id) != merges(prev));
            match block.state {
                State::Live => live += block.size,
                State::Pending => {}
                State::Free => free.push(block.entry(id)),
                State::Unmapped => {
                    let page = PAGES[usize::from(block.kind)];
                    assert_eq!([(block.place - start) % page, block.size % page], [0; 2]);
                    unmapped.push((block.stream, block.place, id));
                }
            }
            held += if block.state == State::Unmapped { 0 } else { block.size };
            (prev, id, at) = (id, block.next, at + block.size);
        }
        assert_eq!(at - start, segment.bytes);
    }
    assert_eq!((held, live), subject.held());
    if subject.options.expandable_segments {
        assert_eq!(subject.pages.values().map(|(_, page)| page).sum::<u64>(), held);
    }
    let indexes = subject.pools.iter().flat_map(|pool| &pool.free);
    let mut indexed: Vec<Entry> = Vec::new();
    for index in indexes {
        let from = indexed.len();
        indexed.extend(index.iter_from(0));
        assert!(indexed[from..].is_sorted());
    }
    free.sort_unstable();
    indexed.sort_unstable();
    assert_eq!(free, indexed);
    let mut indexed: Vec<_> = subject.pools.iter().flat_map(|pool| &pool.unmapped).copied().collect();
    unmapped.sort_unstable();
    indexed.sort_unstable();
    assert_eq!(unmapped, indexed);
}

#[test]
fn blocks_tile_their_segments_when_random_programs_lack_memory() {
    let configs = [
        "backing:pytorch",
        "backing:pytorch,max_split_size_mb:40",
        "backing:pytorch,roundup_power2_divisions:4",
        "backing:pytorch,garbage_collection_threshold:0.7,limit_mb:250",
        "backing:expandable",
    ];
    for seed in 0..80 {
        let config = configs[usize::try_from(seed % 5).unwrap()];
        let lag = if config == "backing:expandable" { 0 } else { seed % 3 };
        let mut subject = model("sim:300MiB", config, lag);
        let mut live = Vec::new();
        let mut draw = Random::new(seed);
        for _ in 0..400 {
            subject.begin_event();
            if draw.below(5) < 2 && !live.is_empty() {
                let at = draw.below(u32::try_from(live.len()).unwrap()) as usize;
                let mut block = live.swap_remove(at);
                if draw.below(4) == 0 {
                    subject.record_stream(&mut block, 1).unwrap();
                }
                subject.free(block);
            } else {
                let most = [1 << 16, 1 << 20, 30 << 20, 90 << 20][draw.below(4) as usize];
                let (bytes, stream) = (1 + draw.below(most), draw.below(2));
                live.extend(subject.alloc(bytes.into(), u16::try_from(stream).unwrap()).ok());
            }
            assert_consistent(&subject);
        }
        assert!(subject.stats().num_alloc_retries > 0, "seed {seed}");
    }
}
