//! The race detector against a model that keeps, instead of clocks, the set of all operations that
//! something is ordered after.

use std::collections::BTreeSet;

use aquifer_device::{AccessKind, Driver, RawStream};
use proptest::prelude::*;

use crate::common::{Short, device};

/// Names the operations that something is ordered after.
type Before = BTreeSet<u64>;

#[derive(Default)]
struct Model {
    /// By stream: the operations that its next one is ordered after. Stream 0 is the legacy stream.
    streams: Vec<Before>,
    blocking: Vec<bool>,
    events: Vec<Option<Before>>,
    host: Before,
    /// What destroyed blocking streams left for the legacy stream.
    destroyed: Before,
    /// Number, first byte, end, whether it writes.
    accesses: Vec<(u64, u64, u64, bool)>,
    count: u64,
}

impl Model {
    fn arrive(&mut self, stream: usize) {
        if stream == 0 {
            let mut all = self.destroyed.clone();
            all.extend(self.streams.iter().zip(&self.blocking).filter(|(_, blocks)| **blocks).flat_map(|(set, _)| set));
            self.streams[0] = all;
        } else if self.blocking[stream] {
            let legacy = self.streams[0].clone();
            self.streams[stream].extend(legacy);
        }
    }

    /// Adds an operation; true when it conflicts with an earlier one that it is not ordered after.
    fn enqueue(&mut self, stream: usize, accesses: &[(u64, u64, bool)]) -> bool {
        self.arrive(stream);
        self.count += 1;
        let known = |number| self.streams[stream].contains(&number) || self.host.contains(&number);
        let races = self.accesses.iter().any(|&(number, start, end, writes)| {
            let meets = |&(from, to, write): &(u64, u64, bool)| start < to && from < end && (writes || write);
            !known(number) && accesses.iter().any(meets)
        });
        self.streams[stream].insert(self.count);
        self.accesses.extend(accesses.iter().map(|&(from, to, write)| (self.count, from, to, write)));
        races
    }
}

#[derive(Clone, Debug)]
enum Step {
    Kernel { stream: usize, accesses: Vec<(u64, u64, bool)> },
    Record { event: usize, stream: usize },
    Wait { event: usize, stream: usize },
    SynchronizeStream(usize),
    SynchronizeEvent(usize),
    Synchronize,
    Replace(usize),
}

const STREAMS: usize = 5;

fn step() -> impl Strategy<Value = Step> {
    let access =
        (0u64..64, 1u64..24, prop::bool::weighted(0.4)).prop_map(|(from, length, write)| (from, from + length, write));
    let (stream, event) = (0..STREAMS, 0usize..3);
    prop_oneof![
        12 => (stream.clone(), prop::collection::vec(access, 1..3))
            .prop_map(|(stream, accesses)| Step::Kernel { stream, accesses }),
        8 => (event.clone(), stream.clone()).prop_map(|(event, stream)| Step::Record { event, stream }),
        10 => (event.clone(), stream.clone()).prop_map(|(event, stream)| Step::Wait { event, stream }),
        2 => stream.clone().prop_map(Step::SynchronizeStream),
        2 => event.prop_map(Step::SynchronizeEvent),
        1 => Just(Step::Synchronize),
        1 => (1..STREAMS).prop_map(Step::Replace),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_first_race_is_found_exactly(
        steps in prop::collection::vec(step(), 1..50),
        seed in any::<u64>(),
        // How many other streams come and go before each stream is made, so that identities are
        // close together or far apart.
        others in prop_oneof![Just(0), Just(20), Just(60)],
    ) {
        let driver = device(seed);
        let memory = driver.alloc(4096).unwrap();
        let blocks = |index: usize| index != 1 && index != 2;
        let create = |index: usize| {
            (0..others).for_each(|_| driver.destroy_stream(driver.stream()).unwrap());
            match index {
                0 => RawStream::LEGACY,
                _ if blocks(index) => driver.blocking_stream(),
                _ => driver.stream(),
            }
        };
        let mut streams: Vec<_> = (0..STREAMS).map(create).collect();
        let events: Vec<_> = (0..3).map(|_| driver.event()).collect();
        let mut model = Model {
            streams: vec![Before::new(); STREAMS],
            blocking: (0..STREAMS).map(blocks).collect(),
            events: vec![None; 3],
            ..Model::default()
        };
        for step in steps {
            match step {
                Step::Kernel { stream, accesses } => {
                    let races = model.enqueue(stream, &accesses);
                    let kind = |write| if write { AccessKind::Write } else { AccessKind::Read };
                    let ranges: Vec<_> =
                        accesses
                            .iter()
                            .map(|&(from, to, write)| (memory.offset(from), to - from, kind(write)))
                            .collect();
                    driver.kernel("work", &ranges, None, streams[stream]).unwrap();
                    let found = driver.violations();
                    prop_assert_eq!(races, !found.is_empty(), "{:?}", found);
                    if races {
                        prop_assert!(found.iter().all(|violation| violation.second.kernel == Some("work")));
                        return Ok(());
                    }
                }
                Step::Record { event, stream } => {
                    model.arrive(stream);
                    model.events[event] = Some(model.streams[stream].clone());
                    driver.record(events[event], streams[stream]).unwrap();
                }
                Step::Wait { event, stream } => {
                    if let Some(before) = model.events[event].clone() {
                        model.arrive(stream);
                        model.streams[stream].extend(before);
                    }
                    driver.wait(streams[stream], events[event]).unwrap();
                }
                Step::SynchronizeStream(stream) => {
                    model.host.extend(&model.streams[stream]);
                    driver.synchronize_stream(streams[stream]).unwrap();
                }
                Step::SynchronizeEvent(event) => {
                    model.host.extend(model.events[event].iter().flatten());
                    driver.synchronize_event(events[event]).unwrap();
                }
                Step::Synchronize => {
                    model.host.extend(1..=model.count);
                    driver.synchronize().unwrap();
                }
                Step::Replace(stream) => {
                    if blocks(stream) {
                        model.destroyed.extend(&model.streams[stream]);
                    }
                    model.streams[stream].clear();
                    driver.destroy_stream(streams[stream]).unwrap();
                    streams[stream] = create(stream);
                }
            }
        }
    }
}
