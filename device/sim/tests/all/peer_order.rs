//! The race detectors of two devices against a model that keeps, instead of clocks, the set of all
//! operations that something is ordered after, and the bytes that a program without races leaves.

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_device::{AccessKind, DevicePtr, Driver, RawEvent, RawStream};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

use crate::common::Short;

/// Names the operations that something is ordered after, of both devices.
type Before = BTreeSet<u64>;

const STREAMS: usize = 3;
const EVENTS: usize = 2;
const BYTES: u64 = 64;

/// An access of an operation: number, device, first byte, end, whether it writes.
#[derive(Clone, Copy)]
struct AccessRange {
    op: u64,
    device: usize,
    from: u64,
    to: u64,
    writes: bool,
}

#[derive(Default)]
struct Model {
    /// By device and stream: the operations that its next one is ordered after.
    streams: [[Before; STREAMS]; 2],
    events: [[Option<Before>; EVENTS]; 2],
    /// What destroyed streams left.
    destroyed: [Before; 2],
    host: Before,
    accesses: Vec<AccessRange>,
    count: u64,
    bytes: [Vec<u8>; 2],
}

impl Model {
    /// Adds an operation; returns the device on whose memory it conflicts with an earlier one that
    /// it is not ordered after.
    fn enqueue(&mut self, (device, stream): (usize, usize), touched: &[(usize, u64, u64, bool)]) -> [bool; 2] {
        self.count += 1;
        let op = self.count;
        let before = &self.streams[device][stream];
        let ordered = |access: &AccessRange| before.contains(&access.op) || self.host.contains(&access.op);
        let mut races = [false; 2];
        for &(on, from, to, writes) in touched {
            let meets = |access: &AccessRange| {
                access.device == on && access.from < to && from < access.to && (access.writes || writes)
            };
            races[on] |= self.accesses.iter().any(|access| meets(access) && !ordered(access));
        }
        self.accesses.extend(touched.iter().map(|&(device, from, to, writes)| AccessRange {
            op,
            device,
            from,
            to,
            writes,
        }));
        self.streams[device][stream].insert(op);
        races
    }
}

#[derive(Clone, Debug)]
enum Step {
    Fill {
        at: (usize, usize),
        from: u64,
        length: u64,
        value: u8,
    },
    Read {
        at: (usize, usize),
        from: u64,
        length: u64,
    },
    Copy {
        at: (usize, usize),
        dst: u64,
        src: u64,
        length: u64,
    },
    Record {
        event: usize,
        at: (usize, usize),
    },
    /// The event may be of the other device.
    Wait {
        event: (usize, usize),
        at: (usize, usize),
    },
    SynchronizeStream((usize, usize)),
    SynchronizeEvent((usize, usize)),
    Synchronize(usize),
    Replace((usize, usize)),
}

fn step() -> impl Strategy<Value = Step> {
    let at = || (0usize..2, 0..STREAMS);
    let event = || (0usize..2, 0..EVENTS);
    let (place, length) = (|| 0..BYTES - 16, || 1u64..16);
    prop_oneof![
        6 => (at(), place(), length(), any::<u8>())
            .prop_map(|(at, from, length, value)| Step::Fill { at, from, length, value }),
        4 => (at(), place(), length()).prop_map(|(at, from, length)| Step::Read { at, from, length }),
        8 => (at(), place(), place(), length()).prop_map(|(at, dst, src, length)| Step::Copy { at, dst, src, length }),
        9 => (0..EVENTS, at()).prop_map(|(event, at)| Step::Record { event, at }),
        14 => (event(), at()).prop_map(|(event, at)| Step::Wait { event, at }),
        2 => at().prop_map(Step::SynchronizeStream),
        2 => event().prop_map(Step::SynchronizeEvent),
        1 => (0usize..2).prop_map(Step::Synchronize),
        1 => at().prop_map(Step::Replace),
    ]
}

struct Devices {
    drivers: [Arc<SimDriver>; 2],
    memory: [DevicePtr; 2],
    streams: [[RawStream; STREAMS]; 2],
    events: [[RawEvent; EVENTS]; 2],
}

impl Devices {
    fn new(seed: u64) -> Devices {
        let drivers = [0u32, 1]
            .map(|ordinal| SimDriver::new(SimConfig::new(1 << 30).ordinal(ordinal).seed(seed ^ u64::from(ordinal))));
        let each = || [&drivers[0], &drivers[1]];
        let memory = each().map(|driver| driver.alloc(4096).unwrap());
        let streams = each().map(|driver| [(); STREAMS].map(|()| driver.stream()));
        let events = each().map(|driver| [(); EVENTS].map(|()| driver.event()));
        for (driver, memory) in drivers.iter().zip(memory) {
            driver.memset(memory, 0, BYTES, RawStream::LEGACY).unwrap();
            driver.synchronize().unwrap();
        }
        Devices { drivers, memory, streams, events }
    }

    /// Makes a step, here and in the model. Tells on which device's memory it should race.
    fn play(&mut self, model: &mut Model, step: &Step) -> [bool; 2] {
        match *step {
            Step::Fill { at, from, length, value } => {
                let (device, stream) = at;
                let ptr = self.memory[device].offset(from);
                self.drivers[device].memset(ptr, value, length, self.streams[device][stream]).unwrap();
                model.bytes[device][at_byte(from)..at_byte(from + length)].fill(value);
                return model.enqueue(at, &[(device, from, from + length, true)]);
            }
            Step::Read { at, from, length } => {
                let (device, stream) = at;
                let range = (self.memory[device].offset(from), length, AccessKind::Read);
                self.drivers[device].kernel("reads", &[range], None, self.streams[device][stream]).unwrap();
                return model.enqueue(at, &[(device, from, from + length, false)]);
            }
            Step::Copy { at, dst, src, length } => {
                let ((device, stream), peer) = (at, 1 - at.0);
                let (to, from) = (self.memory[device].offset(dst), self.memory[peer].offset(src));
                let stream = self.streams[device][stream];
                self.drivers[device].copy_peer(to, &*self.drivers[peer], from, length, stream).unwrap();
                let taken = model.bytes[peer][at_byte(src)..at_byte(src + length)].to_vec();
                model.bytes[device][at_byte(dst)..at_byte(dst + length)].copy_from_slice(&taken);
                return model.enqueue(at, &[(device, dst, dst + length, true), (peer, src, src + length, false)]);
            }
            Step::Record { event, at: (device, stream) } => {
                self.drivers[device].record(self.events[device][event], self.streams[device][stream]).unwrap();
                model.events[device][event] = Some(model.streams[device][stream].clone());
            }
            Step::Wait { event: (owner, event), at: (device, stream) } => {
                let raw = self.events[owner][event];
                let waits = self.streams[device][stream];
                match owner == device {
                    true => self.drivers[device].wait(waits, raw).unwrap(),
                    false => self.drivers[device].wait_peer(waits, &*self.drivers[owner], raw).unwrap(),
                }
                let before = model.events[owner][event].clone();
                model.streams[device][stream].extend(before.into_iter().flatten());
            }
            Step::SynchronizeStream((device, stream)) => {
                self.drivers[device].synchronize_stream(self.streams[device][stream]).unwrap();
                model.host.extend(&model.streams[device][stream]);
            }
            Step::SynchronizeEvent((device, event)) => {
                self.drivers[device].synchronize_event(self.events[device][event]).unwrap();
                model.host.extend(model.events[device][event].iter().flatten());
            }
            Step::Synchronize(device) => {
                self.drivers[device].synchronize().unwrap();
                model.host.extend(model.streams[device].iter().flatten());
                model.host.extend(&model.destroyed[device]);
            }
            Step::Replace((device, stream)) => {
                self.drivers[device].destroy_stream(self.streams[device][stream]).unwrap();
                self.streams[device][stream] = self.drivers[device].stream();
                let left = std::mem::take(&mut model.streams[device][stream]);
                model.destroyed[device].extend(left);
            }
        }
        [false; 2]
    }

    fn found(&self) -> [bool; 2] {
        [0, 1].map(|device: usize| !self.drivers[device].violations().is_empty())
    }
}

fn at_byte(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_first_race_between_devices_is_found_exactly_and_bytes_arrive_without_one(
        steps in prop::collection::vec(step(), 1..60), seed in any::<u64>(),
    ) {
        let mut devices = Devices::new(seed);
        let zeros = vec![0; at_byte(BYTES)];
        let mut model = Model { bytes: [zeros.clone(), zeros], ..Model::default() };
        for step in &steps {
            let races = devices.play(&mut model, step);
            let violations = devices.drivers.each_ref().map(|driver| driver.violations());
            prop_assert_eq!(races, devices.found(), "at {:?}, found {:?}", step, violations);
            if races != [false; 2] {
                return Ok(());
            }
        }
        for device in [0, 1] {
            devices.drivers[device].synchronize().unwrap();
        }
        for device in [0, 1] {
            let bytes = devices.drivers[device].get(devices.memory[device], at_byte(BYTES), RawStream::LEGACY).unwrap();
            prop_assert_eq!(&bytes, &model.bytes[device]);
            prop_assert!(devices.drivers[device].violations().is_empty());
        }
    }
}
