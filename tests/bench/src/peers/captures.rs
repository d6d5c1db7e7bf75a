//! Captures of several streams, as in PyTorch's pull request 158352: how much memory of a graph's
//! pool is used again within the capture.

use aquifer::memory::PoolOptions;
use aquifer::{Buffer, Error, Stream};
use aquifer_stress::exit::Failure;
use aquifer_trace::input::Program;
use aquifer_trace::{Random, Script};

use super::Lab;
use crate::Bench;
use crate::row::{Row, ratio};

/// Each operation uses a random block on a random stream. Before it a block may be allocated, one
/// be freed, and a stream join another.
pub(super) struct Captures {
    pub(super) name: String,
    pub(super) streams: u16,
    operations: u32,
    /// How often an operation allocates, in percent.
    allocates: u32,
}

/// How often an operation frees, and joins streams, in percent.
const FREES: u32 = 10;
const JOINS: u32 = 10;
const BLOCK_BYTES: u64 = 4 << 20;
/// Graphs that are captured one after the other, in one pool.
const GRAPHS: usize = 4;

/// A step of a capture. Blocks are numbered in the order in which they are allocated.
#[derive(Debug, Clone, Copy)]
enum Step {
    Alloc {
        stream: u16,
    },
    Use {
        block: usize,
        stream: u16,
    },
    Free {
        block: usize,
    },
    /// Later work of a stream comes after the work of another.
    Join {
        from: u16,
        to: u16,
    },
}

/// A live block: its number, its stream, the stream of its last use, and whether another than its
/// own used it.
struct Live {
    block: usize,
    stream: u16,
    last: u16,
    is_shared: bool,
}

impl Captures {
    pub(super) fn all() -> Vec<Captures> {
        let of = |(streams, allocates)| Captures {
            name: format!("captures/{streams}/1000/{allocates}"),
            streams,
            operations: 1000,
            allocates,
        };
        [(2, 10), (4, 10), (2, 30), (4, 30)].map(of).into()
    }

    /// The steps, and the blocks that several streams use.
    fn steps(&self) -> (Vec<Step>, Vec<bool>) {
        let (mut random, mut steps, mut shared) = (Random::new(0), Vec::new(), Vec::new());
        let mut live: Vec<Live> = Vec::new();
        let below = |random: &mut Random, count: usize| random.below(u32::try_from(count).unwrap_or(u32::MAX)) as usize;
        for _ in 0..self.operations {
            let [stream, other] = [(); 2].map(|()| u16::try_from(random.below(self.streams.into())).unwrap_or(0));
            if live.is_empty() || random.below(100) < self.allocates {
                live.push(Live { block: shared.len(), stream, last: stream, is_shared: false });
                shared.push(false);
                steps.push(Step::Alloc { stream });
            }
            if random.below(100) < JOINS && stream != other {
                steps.push(Step::Join { from: other, to: stream });
            }
            let index = below(&mut random, live.len());
            let used = &mut live[index];
            if used.last != stream {
                steps.push(Step::Join { from: used.last, to: stream });
            }
            (used.last, used.is_shared) = (stream, used.is_shared || used.stream != stream);
            steps.push(Step::Use { block: used.block, stream });
            if random.below(100) < FREES && live.len() > 1 {
                let Live { block, is_shared, .. } = live.swap_remove(below(&mut random, live.len()));
                shared[block] = is_shared;
                steps.push(Step::Free { block });
            }
        }
        (steps, shared)
    }

    /// The most bytes that are live.
    fn peak(&self) -> u64 {
        self.program(|_| true).peak_requested_bytes
    }

    /// A capture as PyTorch's allocator serves it by default: what several streams used is free
    /// once the capture ends.
    pub(super) fn of_pytorch(&self) -> Program {
        let (_, shared) = self.steps();
        self.program(|block| !shared[block])
    }

    /// The allocations, and the frees of some blocks.
    fn program(&self, is_freed: impl Fn(usize) -> bool) -> Program {
        let (mut script, mut blocks) = (Script::new(&self.name, self.streams), Vec::new());
        for step in self.steps().0 {
            match step {
                Step::Alloc { stream } => blocks.push(Some(script.alloc_on(BLOCK_BYTES, stream))),
                Step::Free { block } if is_freed(block) => script.free_all(blocks[block].take()),
                _ => {}
            }
        }
        script.finish()
    }

    /// The figures of an allocator that holds so much.
    pub(super) fn figures(&self, held: u64) -> Row {
        let peak = self.peak();
        let row = Row::new().with("peak_requested_bytes", peak).with("peak_reserved_bytes", held);
        row.with("reserved_over_requested", ratio(held, peak))
    }

    /// Captures the graphs with this project's allocator.
    pub(super) fn capture(&self, bench: &Bench, lab: &Lab) -> Result<Row, Failure> {
        let memory = bench.session.allocator(&lab.device, &bench.config)?;
        let pool = memory.create_pool(PoolOptions::default())?;
        let first = lab.device.stream()?;
        let others = (1..self.streams).map(|_| lab.device.stream()).collect::<Result<Vec<_>, _>>()?;
        let event = lab.device.create_event(false)?;
        let join = |from: &Stream, to: &Stream| {
            event.record(from)?;
            to.wait_event(&event)
        };
        let (steps, _) = self.steps();
        let work = |first: &Stream| {
            let streams: Vec<&Stream> = [first].into_iter().chain(&others).collect();
            others.iter().try_for_each(|other| join(first, other))?;
            let mut blocks: Vec<Option<Buffer<u8>>> = Vec::new();
            for &step in &steps {
                match step {
                    Step::Alloc { stream } => {
                        let bytes = usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX);
                        blocks.push(Some(memory.alloc(bytes, streams[usize::from(stream)])?));
                    }
                    Step::Use { block, stream } => {
                        blocks[block].iter_mut().try_for_each(|block| block.zero(streams[usize::from(stream)]))?;
                    }
                    Step::Free { block } => drop(blocks[block].take()),
                    Step::Join { from, to } => join(streams[usize::from(from)], streams[usize::from(to)])?,
                }
            }
            drop(blocks);
            others.iter().try_for_each(|other| join(other, first))?;
            Ok::<(), Error>(())
        };
        let graphs: Result<Vec<_>, Error> = (0..GRAPHS).map(|_| memory.graph_in(&pool, &first, work)).collect();
        let graphs = graphs?;
        let held = memory.reserved_by_private_pools().values().sum();
        graphs.iter().try_for_each(|graph| graph.launch(&first))?;
        lab.device.synchronize()?;
        Ok(self.figures(held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_streams_use_is_not_freed_within_a_capture_of_pytorch() {
        for captures in Captures::all() {
            let (whole, deferred) = (captures.peak(), captures.of_pytorch().peak_requested_bytes);
            assert!(whole % BLOCK_BYTES == 0 && whole < deferred, "{}: {whole} {deferred}", captures.name);
        }
    }
}
