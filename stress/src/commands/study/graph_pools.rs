//! What the private pools of CUDA graphs waste, as far as a recording shows it.
//!
//! Free memory of such a pool serves its graphs alone, and graphs of one pool use the same. So
//! several pools hold the sum of what one after the other would need. What captures leave in a
//! pool, such as outputs, adds up with every batch size that is captured.

use super::rows::Advice;
use aquifer_trace::input::{PoolUse, Program};

use crate::text::{Bytes, plural};

/// What must be free in pools, or live in them, in parts of all memory held.
const FREE: u64 = 50;
const LIVE: u64 = 10;
/// Blocks that live on in pools before captures are said to add up.
const BLOCKS: u64 = 8;

/// Advice about pools of graphs. A recording does not tell how many graphs share a pool, and
/// whether one that the program made serves graphs.
pub(super) fn graph_pools(program: &Program) -> Vec<Advice> {
    let private = || program.pools.iter().filter(|pool| pool.id != (0, 0));
    let held = program.memory.iter().map(|piece| piece.bytes).fold(0, u64::saturating_add);
    let mut advice = Vec::new();
    let sum = |of: fn(&PoolUse) -> u64| private().map(of).fold(0, u64::saturating_add);
    let (free, largest) = (sum(|pool| pool.free_bytes), private().map(|pool| pool.free_bytes).max());
    let saves = free - largest.unwrap_or(0);
    let pools = private().count() as u64;
    if saves > 0 && saves >= held / FREE {
        let own = private().filter(|pool| pool.id.1 == 0).count() as u64;
        let of_captures = match own {
            0 => String::new(),
            _ => format!(", {own} of them of captures that were given no pool"),
        };
        advice.push(Advice {
            title: "Capture CUDA graphs into one pool, or capture fewer batch sizes".to_owned(),
            text: format!(
                "{} hold {}{of_captures}. {} are free there and serve no other request. Graphs that share a pool run \
                 one after the other and need as much as the largest one, besides what lives on: up to {} less. In \
                 PyTorch: `torch.cuda.graph(graph, pool=pool)` with one `torch.cuda.graph_pool_handle()`. In Aquifer: \
                 `Allocator::graph_in`. Fewer batch sizes need fewer graphs, each of which takes memory of the driver, \
                 too.",
                plural(pools, "private pool"),
                Bytes(sum(|pool| pool.held_bytes)),
                Bytes(free),
                Bytes(saves),
            ),
            saves: Some(saves),
            figures: None,
        });
    }
    let (live, blocks) = (sum(|pool| pool.held_bytes - pool.free_bytes), sum(|pool| pool.live_blocks));
    if blocks >= BLOCKS && live >= held / LIVE {
        advice.push(Advice {
            title: "Capture fewer batch sizes, or let CUDA graphs share inputs and outputs".to_owned(),
            text: format!(
                "{blocks} blocks of {} in all live on in {}, where each capture leaves its own. Inputs and outputs of \
                 the largest size can serve all sizes.",
                Bytes(live),
                plural(pools, "private pool"),
            ),
            saves: None,
            figures: None,
        });
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_trace::input;

    const MIB: u64 = 1 << 20;

    /// A snapshot with a segment of 100 MiB in the default pool, and one in each of these pools,
    /// with so many MiB that are live, in blocks of 1 MiB, and free.
    fn snapshot(pools: &[([u64; 2], u64, u64)]) -> Program {
        let block = |mib: u64, state: &str| format!(r#"{{"size": {}, "state": "{state}"}}"#, mib * MIB);
        let segment = |at: u64, pool: [u64; 2], blocks: Vec<String>| {
            let (address, blocks) = (at << 30, blocks.join(", "));
            format!(
                r#"{{"device": 0, "stream": 0, "address": {address}, "segment_pool_id": {pool:?}, "blocks": [{blocks}]}}"#
            )
        };
        let mut segments = vec![segment(1, [0, 0], vec![block(100, "active_allocated")])];
        for (at, &(pool, live, free)) in (2..).zip(pools) {
            let mut blocks: Vec<_> = (0..live).map(|_| block(1, "active_allocated")).collect();
            blocks.push(block(free, "inactive"));
            segments.push(segment(at, pool, blocks));
        }
        let alloc = format!(r#"{{"action": "alloc", "addr": {}, "size": 1000, "stream": 0}}"#, 1_u64 << 40);
        let text = format!(r#"{{"segments": [{}], "device_traces": [[{alloc}]]}}"#, segments.join(", "));
        input::read("s.json".as_ref(), text.as_bytes()).unwrap().remove(0)
    }

    fn titles(program: &Program) -> Vec<String> {
        graph_pools(program).into_iter().map(|advice| advice.title).collect()
    }

    #[test]
    fn pools_of_several_graphs_are_found_with_what_one_pool_saves() {
        let program = snapshot(&[([1, 0], 0, 30), ([2, 0], 1, 60), ([0, 7], 0, 40)]);
        let found = graph_pools(&program);
        let [advice] = &found[..] else { panic!("{found:?}") };
        assert_eq!(advice.title, "Capture CUDA graphs into one pool, or capture fewer batch sizes");
        assert_eq!(advice.saves, Some(70 * MIB));
        for part in [
            "3 private pools hold 131.00 MiB, 2 of them of captures that were given no pool.",
            "130.00 MiB are free there",
            "up to 70.00 MiB less",
        ] {
            assert!(advice.text.contains(part), "{}", advice.text);
        }
    }

    #[test]
    fn what_captures_leave_in_their_pool_is_found() {
        let program = snapshot(&[([0, 1], 30, 50)]);
        let found = graph_pools(&program);
        let [advice] = &found[..] else { panic!("{found:?}") };
        assert_eq!(advice.title, "Capture fewer batch sizes, or let CUDA graphs share inputs and outputs");
        assert!(advice.text.starts_with("30 blocks of 30.00 MiB in all live on in 1 private pool,"), "{}", advice.text);
    }

    #[test]
    fn recordings_without_waste_in_pools_bring_no_such_advice() {
        for pools in [&[][..], &[([0, 1], 3, 50)], &[([1, 0], 0, 60), ([2, 0], 2, 1)]] {
            assert_eq!(titles(&snapshot(pools)), [""; 0], "{pools:?}");
        }
        let trace = input::read("p.trace".as_ref(), &b"a 1 30000000 0\nf 1 0\n"[..]).unwrap().remove(0);
        assert_eq!((trace.pools.len(), titles(&trace).len()), (0, 0), "a trace tells of no pools");
    }
}
