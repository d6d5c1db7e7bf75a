//! The memory that a program needs on a device that lags, if it never waits for the device.

use std::collections::VecDeque;

use aquifer_trace::input::{Event, Program};

/// What was live on a stream, over the last events.
#[derive(Debug, Default)]
struct Recent {
    live: u64,
    /// Bytes of freed blocks that the device may be using on another stream.
    waiting: u64,
    /// Amounts that may be the most of the window, each smaller than the one before, with the event
    /// at which it ended. The last one, which is live now, has not ended.
    amounts: VecDeque<(u64, usize)>,
}

impl Recent {
    /// What no other stream can have now.
    fn kept(&self) -> u64 {
        let most = self.amounts.front().map_or(0, |&(bytes, _)| bytes);
        most.max(self.live + self.waiting)
    }

    /// Changes what is live at an event.
    fn change(&mut self, live: u64, at: usize) {
        if let Some(last) = self.amounts.back_mut() {
            last.1 = at;
        }
        self.live = live;
        while self.amounts.back().is_some_and(|&(bytes, _)| bytes <= live) {
            self.amounts.pop_back();
        }
        self.amounts.push_back((live, usize::MAX));
    }

    /// Forgets amounts that ended at or before an event.
    fn forget(&mut self, until: usize) {
        while self.amounts.front().is_some_and(|&(_, end)| end <= until) {
            self.amounts.pop_front();
        }
    }
}

/// The least bytes that serve a program on a device that is `lag` events behind, if the program
/// never waits for it. A stream reuses its own memory at once, and that of another stream once the
/// device has reached the free. Nobody reuses memory that other streams used before that. So this
/// is the most, over all times, of the sum over streams of the most that was live on the stream
/// within the last `lag` events, or of what is live and what was freed after such uses, whichever
/// is more.
pub fn lag_bound(program: &Program, lag: u64) -> u64 {
    let lag = usize::try_from(lag).unwrap_or(usize::MAX);
    let mut streams: Vec<Recent> = Vec::new();
    streams.resize_with(program.streams.len(), Recent::default);
    // Bytes and stream of each block, and whether other streams use it.
    let mut slots = vec![(0_u64, 0_usize, false); program.slots as usize];
    // The changes within the last `lag` events, by event, each with the bytes that wait since.
    let mut changes: VecDeque<(usize, usize, u64)> = VecDeque::new();
    let (mut sum, mut most) = (0_u64, 0);
    let events = program.events.iter().filter(|event| !matches!(event, Event::Iteration(_)));
    for (at, event) in events.enumerate() {
        let (stream, live, waits) = match *event {
            Event::Alloc { slot, bytes, stream } => {
                let stream = usize::from(stream);
                slots[slot as usize] = (bytes, stream, false);
                (stream, streams[stream].live + bytes, 0)
            }
            Event::Free { slot } => {
                let (bytes, stream, is_shared) = slots[slot as usize];
                (stream, streams[stream].live - bytes, if is_shared { bytes } else { 0 })
            }
            Event::RecordStream { slot, stream } => {
                let (_, own, is_shared) = &mut slots[slot as usize];
                *is_shared |= *own != usize::from(stream);
                continue;
            }
            Event::Iteration(_) => continue,
        };
        let recent = &mut streams[stream];
        sum -= recent.kept();
        recent.change(live, at);
        recent.waiting += waits;
        sum += recent.kept();
        changes.push_back((at, stream, waits));
        let is_over = |&(then, ..): &(usize, usize, u64)| then.saturating_add(lag) <= at;
        while let Some((_, stream, waited)) = changes.front().copied().filter(is_over) {
            changes.pop_front();
            let recent = &mut streams[stream];
            sum -= recent.kept();
            recent.forget(at - lag);
            recent.waiting -= waited;
            sum += recent.kept();
        }
        most = most.max(sum);
    }
    most
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn program(events: Vec<Event>, slots: u32, streams: u64) -> Program {
        Program { events, slots, streams: (0..streams).collect(), ..Program::default() }
    }

    /// The same by its definition.
    fn by_definition(program: &Program, lag: usize) -> u64 {
        let mut live = vec![vec![0_u64; program.streams.len()]];
        let mut slots = vec![(0, 0, false); program.slots as usize];
        // Frees of blocks that other streams used: time, stream and bytes.
        let mut shared = Vec::new();
        for event in &program.events {
            let mut now = live.last().unwrap().clone();
            match *event {
                Event::Alloc { slot, bytes, stream } => {
                    slots[slot as usize] = (bytes, usize::from(stream), false);
                    now[usize::from(stream)] += bytes;
                }
                Event::Free { slot } => {
                    let (bytes, stream, is_shared) = slots[slot as usize];
                    now[stream] -= bytes;
                    shared.extend(is_shared.then_some((live.len(), stream, bytes)));
                }
                Event::RecordStream { slot, stream } => {
                    slots[slot as usize].2 |= slots[slot as usize].1 != usize::from(stream);
                }
                Event::Iteration(_) => {}
            }
            live.push(now);
        }
        let most_of = |stream: usize, at: usize| {
            let window = &live[at.saturating_sub(lag)..=at];
            let waits = |&&(then, of, _): &&(usize, usize, u64)| of == stream && then <= at && at - then < lag;
            let waiting: u64 = shared.iter().filter(waits).map(|&(.., bytes)| bytes).sum();
            window.iter().map(|live| live[stream]).max().unwrap_or(0).max(live[at][stream] + waiting)
        };
        let sums = (0..live.len()).map(|at| (0..program.streams.len()).map(|stream| most_of(stream, at)).sum());
        sums.max().unwrap_or(0)
    }

    #[test]
    fn memory_of_another_stream_is_reusable_once_the_device_has_caught_up() {
        let alloc = |slot, stream| Event::Alloc { slot, bytes: 100, stream };
        let events = vec![alloc(0, 0), Event::Free { slot: 0 }, alloc(0, 1), Event::Free { slot: 0 }];
        let program = program(events, 1, 2);
        assert_eq!([0, 1, 2, 100].map(|lag| lag_bound(&program, lag)), [100, 100, 200, 200]);
    }

    proptest! {
        #[test]
        fn the_bound_is_that_of_its_definition(
            steps in prop::collection::vec((any::<bool>(), 0..8_u32, 1..100_u64, 0..3_u16), 0..80),
            lag in 0..40_usize,
        ) {
            let mut is_live = [false; 8];
            let events = steps.into_iter().map(|(records, slot, bytes, stream)| {
                let live = &mut is_live[slot as usize];
                if records && *live {
                    return Event::RecordStream { slot, stream };
                }
                *live = !*live;
                if *live { Event::Alloc { slot, bytes, stream } } else { Event::Free { slot } }
            });
            let program = program(events.collect(), 8, 3);
            prop_assert_eq!(lag_bound(&program, lag as u64), by_definition(&program, lag));
        }
    }
}
