//! The core alone: no driver call is made for it, and a stream gets further when the test says so.

use std::ops::Range;

use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::core::Core;
use crate::history::History;
use crate::size_class::{self, PoolKind};
use crate::tags::Tag;
use crate::types::{Freed, PoolId, Request, StreamId, UNKNOWN, Use};

const STREAMS: usize = 3;
const SEGMENT: u64 = 4 << 20;

#[derive(Clone, Debug)]
enum Step {
    /// Serves a request of a stream, from a new segment if need be.
    Take {
        stream: usize,
        bytes: u64,
    },
    /// Has another stream use a live block.
    Share {
        block: Index,
        stream: usize,
    },
    /// Frees a live block, in the order of a stream if one is given.
    Free {
        block: Index,
        on: Option<usize>,
    },
    /// Has the host learn that all work of a stream is done.
    Done {
        stream: usize,
    },
    EndWaits,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![1..4096_u64, (1 << 20)..(3_u64 << 20)];
    prop_oneof![
        4 => (0..STREAMS, bytes).prop_map(|(stream, bytes)| Step::Take { stream, bytes }),
        1 => (any::<Index>(), 0..STREAMS).prop_map(|(block, stream)| Step::Share { block, stream }),
        3 => (any::<Index>(), prop::option::weighted(0.2, 0..STREAMS)).prop_map(|(block, on)| Step::Free { block, on }),
        1 => (0..STREAMS).prop_map(|stream| Step::Done { stream }),
        1 => Just(Step::EndWaits),
    ]
}

/// A live block.
struct Live {
    freed: Freed,
    range: Range<u64>,
    requested: u64,
    users: Vec<StreamId>,
}

struct World {
    core: Core,
    streams: Vec<Stream>,
    segments: u64,
    live: Vec<Live>,
    /// Uses of memory that was given back.
    used: Vec<(Range<u64>, Use)>,
}

impl World {
    fn new(crosses_streams: bool, quarantine: u64) -> World {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
        let mut core = Core::new(crosses_streams, quarantine, History::default(), None);
        for stream in &streams {
            core.stream(stream);
        }
        World { core, streams, segments: 0, live: Vec::new(), used: Vec::new() }
    }

    fn take(&mut self, stream: usize, bytes: u64) -> Result<(), TestCaseError> {
        let size = size_class::round(bytes);
        let pool = PoolId::default_of(PoolKind::of(size));
        let stream = StreamId::of(&self.streams[stream]);
        let request = Request { requested: bytes, size, pool, stream, tag: Tag::default(), is_regular: true };
        let granted = self.core.take_own(&request).or_else(|| self.core.take_done(&request));
        prop_assert!(granted.is_some() || self.core.heap().quarantined(pool) == 0, "a block was in quarantine");
        let granted = granted.unwrap_or_else(|| {
            self.segments += 1;
            let first = self.core.add_segment(&request, self.segments << 32, SEGMENT);
            self.core.take(&request, first)
        });
        let range = granted.addr..granted.addr + size;
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        prop_assert!(!self.live.iter().any(|live| overlaps(&live.range)), "memory of a live block");
        for (_, one) in self.used.iter().filter(|(used, _)| overlaps(used)) {
            prop_assert!(one.stream == stream || self.core.streams.is_done(*one), "{one:?} is not done");
        }
        let freed = Freed { block: granted.block, stream, on: None, bytes };
        self.live.push(Live { freed, range, requested: bytes, users: vec![stream] });
        Ok(())
    }

    fn free(&mut self, at: usize, on: Option<usize>) {
        let Live { freed, range, mut users, .. } = self.live.swap_remove(at);
        let on = on.map(|on| StreamId::of(&self.streams[on]));
        // The stream that a block is given back on comes after its owner's work.
        if let Some(on) = on {
            users = if users.len() == 1 { vec![on] } else { users.into_iter().chain([on]).collect() };
        }
        // Its uses come after all earlier ones of this memory.
        let earlier = std::mem::take(&mut self.used).into_iter();
        self.used.extend(earlier.flat_map(|(used, one)| {
            let below = used.start..used.end.min(range.start);
            let above = used.start.max(range.end)..used.end;
            [below, above].into_iter().filter(|rest| !rest.is_empty()).map(move |rest| (rest, one))
        }));
        self.used.extend(users.iter().map(|&user| (range.clone(), self.core.streams.use_so_far(user))));
        let bytes = if on.is_some() { UNKNOWN } else { freed.bytes };
        self.core.free(Freed { on, bytes, ..freed });
    }

    fn check(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.core.heap().check(), Ok(()));
        let sum = |bytes: fn(&Live) -> u64| self.live.iter().map(bytes).sum::<u64>();
        prop_assert_eq!(self.core.live(), self.live.len() as u64);
        let counters = &self.core.counters;
        prop_assert_eq!(counters.bytes.current_of_all(), sum(|live| live.range.end - live.range.start));
        let requested = counters.requested.current_of_all() - self.core.waiting().requested();
        prop_assert_eq!(requested, sum(|live| live.requested));
        prop_assert!(counters.active_bytes().all.current <= self.core.reserved());
        prop_assert_eq!(self.core.reserved(), self.segments * SEGMENT);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn memory_is_reused_only_once_its_uses_are_done(
        crosses_streams in any::<bool>(),
        quarantine in prop::sample::select(vec![0, SEGMENT / 2, 64 * SEGMENT]),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut world = World::new(crosses_streams, quarantine);
        for step in steps {
            let count = world.live.len();
            match step {
                Step::Take { stream, bytes } => world.take(stream, bytes)?,
                Step::Share { .. } | Step::Free { .. } if count == 0 => {}
                Step::Share { block, stream } => {
                    let user = StreamId::of(&world.streams[stream]);
                    let live = &mut world.live[block.index(count)];
                    world.core.note_use(live.freed.block, user);
                    if !live.users.contains(&user) {
                        live.users.push(user);
                    }
                }
                Step::Free { block, on } => world.free(block.index(count), on),
                Step::Done { stream } => world.streams[stream].synchronize().unwrap(),
                Step::EndWaits => world.core.end_waits(),
            }
            world.check()?;
        }
        for stream in &world.streams {
            stream.synchronize().unwrap();
        }
        world.core.end_waits();
        prop_assert!(world.core.waiting().is_empty(), "all is done, and nothing waits");
    }
}
