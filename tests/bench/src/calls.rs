//! The cost of driver calls on this device: measured on a real device, from the simulator's cost
//! model on a simulated one.
//!
//! * `calls`: memory is taken in sizes from 2 MiB to 2 GiB, as far as the device has them. Setting
//!   access and unmapping are measured once for a piece of each size, and once for 1, 8 and 64
//!   pieces of one granule at a time. Each size is allocated from the driver's pool twice before the
//!   host waits, as the pool then releases unused memory by default: `cold` if it had released all
//!   memory, `warm` if the same stream had just freed a block of this size.
//! * `bench_vmm`, kvcached's: up to 4096 pages of one granule are each created, then each mapped,
//!   made accessible and unmapped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use aquifer::Device;
use aquifer::device::sim::SimDriver;
use aquifer::device::{DeviceError, DevicePtr, ErrorKind, StreamFlags};
use aquifer_device::{Driver, Operation, PhysicalOptions, RawPhysical};
use aquifer_stress::exit::Failure;
use aquifer_stress::session::Session;
use aquifer_stress::table::{Table, optional};
use aquifer_stress::text::Bytes;
use serde_json::Value;

use crate::row::Row;
use crate::{Bench, Benchmark};

const MIB: u64 = 1 << 20;

/// Sizes of allocations, in bytes.
const SIZES: [u64; 5] = [2 * MIB, 20 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB];

/// The state of the driver's pool: empty, or with a suitable free block.
const COLD: &str = "cold";
const WARM: &str = "warm";

/// Numbers of one-granule mappings that one call covers.
const MAPPINGS: [u64; 3] = [1, 8, 64];

/// The most granules of kvcached's `bench_vmm`.
const PAGES_MAX: u64 = 4096;

/// How often each call is measured.
const ROUNDS: u32 = 20;

pub(crate) fn all() -> Vec<Benchmark> {
    let calls = |bench: &Bench| {
        let mut meter = Meter::open(&bench.session)?;
        let rounds = bench.args.rounds.unwrap_or(ROUNDS);
        for round in 0..=rounds {
            // The first round warms the driver up.
            if round == 1 {
                meter.times.clear();
            }
            meter.plain_memory()?;
            meter.mapped_memory()?;
            meter.mappings()?;
            meter.order()?;
        }
        let row = |(key, times): &(Key, Vec<u64>)| {
            let sorted = Sorted::new(times);
            let row = Row::new().with("call", key.operation.name()).with("bytes", key.bytes);
            let row = row.with("mappings", key.mappings).with("pool", key.pool).with("rounds", times.len());
            meter.clocked(row.us("median_us", sorted.at(50)).us("p95_us", sorted.at(95)))
        };
        Ok(meter.note(&bench.session).times.iter().map(row).collect())
    };
    let pages = |bench: &Bench| {
        let mut meter = Meter::open(&bench.session)?;
        let pages = meter.pages()?;
        let row = |(key, times): &(Key, Vec<u64>)| {
            let sorted = Sorted::new(times);
            let row = Row::new().with("call", key.operation.name()).with("bytes", key.bytes).with("pages", pages);
            let row = row.us("avg_us", sorted.mean()).us("p50_us", sorted.at(50)).us("p90_us", sorted.at(90));
            meter.clocked(row.us("p99_us", sorted.at(99)).us("max_us", sorted.at(100)))
        };
        let of_pages = meter.times.iter().filter(|(key, _)| key.operation != Operation::Reserve);
        meter.note(&bench.session);
        Ok(of_pages.map(row).collect())
    };
    vec![Benchmark::new("bench_vmm", pages), Benchmark::new("calls", calls)]
}

/// The rows as text: one table of the medians of `calls` by size, and tables of the others.
pub(crate) fn tables(rows: &[&Row]) -> String {
    let (by_size, others): (Vec<&Row>, Vec<&Row>) =
        rows.iter().copied().partition(|row| row.get("median_us").is_some());
    let figure = |row: &Row, name| row.get(name).and_then(Value::as_u64).unwrap_or(0);
    let text = |row: &Row, name| row.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = |row: &Row| match (figure(row, "mappings"), text(row, "pool")) {
        (many @ 2.., _) => format!("{}, {many} mappings", text(row, "call")),
        (_, pool) if pool.is_empty() => text(row, "call"),
        (_, pool) => format!("{}, {pool}", text(row, "call")),
    };
    let sizes: BTreeSet<u64> = by_size.iter().map(|row| figure(row, "bytes")).collect();
    let mut names: Vec<String> = Vec::new();
    by_size.iter().map(|row| name(row)).for_each(|name| {
        if !names.contains(&name) {
            names.push(name)
        }
    });
    let cells = names.into_iter().map(|call| {
        let median = |&size: &u64| {
            let heading = if size == 0 { "no size".to_owned() } else { format!("{} MiB", size / MIB) };
            let row = by_size.iter().find(|row| name(row) == call && figure(row, "bytes") == size);
            (heading, optional(row.and_then(|row| row.get("median_us"))))
        };
        let medians: Vec<_> = sizes.iter().map(median).collect();
        [("call, median µs".to_owned(), call)].into_iter().chain(medians).collect()
    });
    let table = if by_size.is_empty() { String::new() } else { format!("\n{}", Table::new(cells.collect())) };
    crate::row::tables(&others) + &table
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    operation: Operation,
    bytes: u64,
    mappings: u64,
    /// The state of the driver's pool, for its calls.
    pool: Option<&'static str>,
}

impl Key {
    fn new(operation: Operation, bytes: u64, mappings: u64) -> Key {
        Key { operation, bytes, mappings, pool: None }
    }
}

/// Times calls.
struct Meter {
    device: Device,
    simulated: Option<Arc<SimDriver>>,
    /// In the order of their first call.
    times: Vec<(Key, Vec<u64>)>,
    /// Measurements that need more memory than the device has.
    left_out: Vec<String>,
}

impl Meter {
    fn open(session: &Session) -> Result<Meter, Failure> {
        let (device, simulated) = session.open_with_simulator()?;
        Ok(Meter { device, simulated, times: Vec::new(), left_out: Vec::new() })
    }

    /// The row, with the device's name and whether times come from the simulator's cost model.
    fn clocked(&self, row: Row) -> Row {
        row.with("device_name", &*self.device.info().name).with("modelled", self.simulated.is_some())
    }

    /// Reports what was left out.
    fn note(&self, session: &Session) -> &Meter {
        self.left_out.iter().for_each(|left_out| session.message(format_args!("note: {left_out}")));
        self
    }

    /// Makes a call and records its time.
    fn time<T>(
        &mut self,
        operation: Operation,
        bytes: u64,
        mappings: u64,
        call: impl FnOnce(&dyn Driver) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.time_as(Key::new(operation, bytes, mappings), call)
    }

    fn time_as<T>(
        &mut self,
        key: Key,
        call: impl FnOnce(&dyn Driver) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let modelled = self.simulated.as_ref().map(|driver| driver.time_in_calls_ns());
        let start = Instant::now();
        let answer = call(self.device.driver())?;
        let elapsed = match (&self.simulated, modelled) {
            (Some(driver), Some(before)) => driver.time_in_calls_ns() - before,
            _ => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        match self.times.iter_mut().find(|(known, _)| *known == key) {
            Some((_, times)) => times.push(elapsed),
            None => self.times.push((key, vec![elapsed])),
        }
        Ok(answer)
    }

    /// Plain allocations, and those of the driver's pool.
    fn plain_memory(&mut self) -> Result<(), DeviceError> {
        for bytes in SIZES {
            let Some(ptr) = enough(self.time(Operation::Alloc, bytes, 0, |driver| driver.alloc(bytes)))? else {
                self.leave_out(&format!("plain allocations of {}", Bytes(bytes)));
                break;
            };
            self.time(Operation::Free, bytes, 0, |driver| driver.free(ptr))?;
            self.pool(bytes)?;
        }
        Ok(())
    }

    /// The driver's pool: cold, when it has just released all memory, and warm, when a block of the
    /// same size was just freed in stream order. Nothing waits in between, as by default the pool
    /// releases unused memory when the host waits.
    fn pool(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let stream = self.device.default_stream().raw();
        self.device.synchronize()?;
        match self.device.driver().trim_pool(0) {
            Err(error) if error.kind != ErrorKind::Unsupported => return Err(error),
            _ => {}
        }
        for pool in [COLD, WARM] {
            let key = |operation| Key { pool: Some(pool), ..Key::new(operation, bytes, 0) };
            match self.time_as(key(Operation::AllocAsync), |driver| driver.alloc_async(bytes, stream)) {
                Ok(ptr) => self.time_as(key(Operation::FreeAsync), |driver| driver.free_async(ptr, stream))?,
                Err(error) if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::OutOfMemory) => break,
                Err(error) => return Err(error),
            }
        }
        self.device.synchronize()
    }

    /// One piece of physical memory of each size.
    fn mapped_memory(&mut self) -> Result<(), DeviceError> {
        let Some(granularity) = self.device.info().granularity_bytes else { return Ok(()) };
        for bytes in SIZES.map(|bytes| bytes.next_multiple_of(granularity)) {
            let ptr = self.time(Operation::Reserve, bytes, 0, |driver| driver.reserve(bytes, 0))?;
            let create = |driver: &dyn Driver| driver.create_physical(bytes, PhysicalOptions::default());
            let outcome = match enough(self.time(Operation::CreatePhysical, bytes, 0, create)) {
                Ok(Some(physical)) => self.map_one(ptr, bytes, physical).map(|()| true),
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            };
            self.time(Operation::Unreserve, bytes, 0, |driver| driver.unreserve(ptr, bytes))?;
            if !outcome? {
                self.leave_out(&format!("physical memory of {}", Bytes(bytes)));
                break;
            }
        }
        Ok(())
    }

    fn map_one(&mut self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<(), DeviceError> {
        let ordinal = self.device.info().ordinal;
        let mapped = self.time(Operation::Map, bytes, 1, |driver| driver.map(ptr, bytes, physical));
        let used = mapped.and_then(|()| {
            let accessible =
                self.time(Operation::SetAccess, bytes, 1, |driver| driver.set_access(ptr, bytes, &[ordinal]));
            accessible.and(self.time(Operation::Unmap, bytes, 1, |driver| driver.unmap(ptr, bytes)))
        });
        used.and(self.time(Operation::ReleasePhysical, bytes, 0, |driver| driver.release_physical(physical)))
    }

    /// One call over many mappings of a granule each.
    fn mappings(&mut self) -> Result<(), DeviceError> {
        let Some(granule) = self.device.info().granularity_bytes else { return Ok(()) };
        let most = MAPPINGS.into_iter().max().unwrap_or(1);
        let ptr = self.device.driver().reserve(most * granule, 0)?;
        let mut pieces = Vec::new();
        let outcome = MAPPINGS.into_iter().try_for_each(|count| self.map_many(ptr, granule, count, &mut pieces));
        let driver = self.device.driver();
        let released = pieces.into_iter().try_for_each(|piece| driver.release_physical(piece));
        outcome.and(released).and(driver.unreserve(ptr, most * granule))
    }

    fn map_many(
        &mut self,
        ptr: DevicePtr,
        granule: u64,
        count: u64,
        pieces: &mut Vec<RawPhysical>,
    ) -> Result<(), DeviceError> {
        let (ordinal, bytes) = (self.device.info().ordinal, count * granule);
        while (pieces.len() as u64) < count {
            let created = self.device.driver().create_physical(granule, PhysicalOptions::default());
            let Some(piece) = enough(created)? else {
                self.leave_out(&format!("{count} mappings"));
                return Ok(());
            };
            pieces.push(piece);
        }
        let mut mapped = 0;
        let outcome = (ptr.0..ptr.0 + bytes)
            .step_by(usize::try_from(granule).unwrap_or(usize::MAX))
            .zip(pieces)
            .try_for_each(|(at, piece)| {
                self.device.driver().map(DevicePtr(at), granule, *piece)?;
                mapped += granule;
                Ok(())
            });
        let accessible = outcome.and_then(|()| {
            self.time(Operation::SetAccess, bytes, count, |driver| driver.set_access(ptr, bytes, &[ordinal]))
        });
        if mapped == bytes {
            return accessible.and(self.time(Operation::Unmap, bytes, count, |driver| driver.unmap(ptr, bytes)));
        }
        let undone = if mapped > 0 { self.device.driver().unmap(ptr, mapped) } else { Ok(()) };
        accessible.and(undone)
    }

    /// kvcached's `bench_vmm`: many granules, each created, then each mapped, made accessible and
    /// unmapped, with one call each. Returns how many; 0 where the device cannot map.
    fn pages(&mut self) -> Result<u64, DeviceError> {
        let Some(granule) = self.device.info().granularity_bytes else { return Ok(0) };
        let count = PAGES_MAX.min(self.device.memory_info()?.free / 2 / granule);
        if count == 0 {
            self.leave_out("pages of bench_vmm");
            return Ok(0);
        }
        let ordinal = self.device.info().ordinal;
        let ptr = self.time(Operation::Reserve, count * granule, 0, |driver| driver.reserve(count * granule, 0))?;
        let at = |page: u64| DevicePtr(ptr.0 + page * granule);
        let (mut pieces, mut mapped) = (Vec::new(), 0);
        let mut each = || -> Result<(), DeviceError> {
            for _ in 0..count {
                let create = |driver: &dyn Driver| driver.create_physical(granule, PhysicalOptions::default());
                let Some(piece) = enough(self.time(Operation::CreatePhysical, granule, 0, create))? else { break };
                pieces.push(piece);
            }
            for (page, &piece) in (0..).zip(&pieces) {
                self.time(Operation::Map, granule, 1, |driver| driver.map(at(page), granule, piece))?;
                mapped = page + 1;
            }
            for page in 0..mapped {
                self.time(Operation::SetAccess, granule, 1, |driver| driver.set_access(at(page), granule, &[ordinal]))?;
            }
            for page in (0..mapped).rev() {
                self.time(Operation::Unmap, granule, 1, |driver| driver.unmap(at(page), granule))?;
                mapped = page;
            }
            Ok(())
        };
        let outcome = each();
        let made = pieces.len() as u64;
        let driver = self.device.driver();
        let unmapped = if mapped > 0 { driver.unmap(ptr, mapped * granule) } else { Ok(()) };
        let released = pieces.into_iter().try_for_each(|piece| driver.release_physical(piece));
        outcome.and(unmapped).and(released).and(driver.unreserve(ptr, count * granule)).map(|()| made)
    }

    /// Streams and events.
    fn order(&mut self) -> Result<(), DeviceError> {
        let flags = StreamFlags { non_blocking: true, priority: 0 };
        let one = self.time(Operation::CreateStream, 0, 0, |driver| driver.create_stream(flags))?;
        let two = self.device.default_stream().raw();
        let event = self.time(Operation::CreateEvent, 0, 0, |driver| driver.create_event(false))?;
        let outcome = self
            .time(Operation::Record, 0, 0, |driver| driver.record(event, one))
            .and_then(|()| self.time(Operation::Wait, 0, 0, |driver| driver.wait(two, event)))
            .and_then(|()| self.time(Operation::QueryEvent, 0, 0, |driver| driver.query_event(event)).map(|_| ()))
            .and_then(|()| self.time(Operation::SynchronizeEvent, 0, 0, |driver| driver.synchronize_event(event)))
            .and_then(|()| self.time(Operation::MemoryInfo, 0, 0, |driver| driver.memory_info()).map(|_| ()))
            .and_then(|()| self.time(Operation::TrimGraphMemory, 0, 0, |driver| driver.trim_graph_memory()));
        let destroyed = self.time(Operation::DestroyEvent, 0, 0, |driver| driver.destroy_event(event));
        outcome.and(destroyed).and(self.time(Operation::DestroyStream, 0, 0, |driver| driver.destroy_stream(one)))
    }

    fn leave_out(&mut self, what: &str) {
        let note = format!("the device has no room for {what} and more");
        if !self.left_out.contains(&note) {
            self.left_out.push(note);
        }
    }
}

/// Times in order, in nanoseconds.
struct Sorted(Vec<u64>);

#[expect(clippy::cast_precision_loss, reason = "times to display")]
impl Sorted {
    fn new(times: &[u64]) -> Sorted {
        let mut times = times.to_vec();
        times.sort_unstable();
        Sorted(times)
    }

    /// The time that so many percent do not exceed.
    fn at(&self, percent: usize) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0.get(last * percent / 100).map_or(0.0, |&ns| ns as f64)
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<u64>() as f64 / self.0.len().max(1) as f64
    }
}

/// `None` if memory is lacking.
fn enough<T>(answer: Result<T, DeviceError>) -> Result<Option<T>, DeviceError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use aquifer_stress::cli::Global;

    use super::*;

    fn meter(device: &str) -> Meter {
        let global = Global { device: Some(device.parse().unwrap()), ..Global::default() };
        Meter::open(&Session::new(&global).unwrap()).unwrap()
    }

    #[test]
    fn a_simulated_device_uses_its_cost_model() {
        let mut meter = meter("sim:24GiB");
        meter.mappings().unwrap();
        let time = |mappings| meter.times.iter().find(|(key, _)| key.mappings == mappings).unwrap().1[0];
        // 8 µs a call, 32 for each mapping, 0.05 for each MiB.
        assert_eq!((time(1), time(8)), (40_100, 8_000 + 8 * 32_100));
        let free = meter.device.memory_info().unwrap();
        assert_eq!(free.free, free.total);
    }

    #[test]
    fn a_page_that_cannot_be_made_accessible_leaves_nothing_behind() {
        for call in ["cuMemCreate#3", "cuMemMap#5", "cuMemSetAccess#2", "cuMemUnmap#4"] {
            let mut meter = meter(&format!("sim:64MiB,fault={call}:999"));
            assert!(meter.pages().is_err(), "{call}");
            let free = meter.device.memory_info().unwrap();
            assert_eq!(free.free, free.total, "{call}");
        }
    }

    #[test]
    fn a_device_of_few_granules_leaves_out_the_mappings_that_need_more() {
        let mut meter = meter("sim:64MiB");
        meter.mappings().unwrap();
        let largest = meter.times.iter().map(|(key, _)| key.mappings).max();
        assert_eq!(largest, Some(8));
        assert!(meter.left_out.contains(&"the device has no room for 64 mappings and more".to_owned()));
        let free = meter.device.memory_info().unwrap();
        assert_eq!(free.free, free.total);
    }

    #[test]
    fn sizes_beyond_the_device_are_left_out_and_nothing_leaks() {
        let mut meter = meter("sim:300MiB");
        meter.plain_memory().unwrap();
        meter.mapped_memory().unwrap();
        meter.order().unwrap();
        let largest = meter.times.iter().map(|(key, _)| key.bytes).max();
        assert_eq!(largest, Some(512 * MIB), "its addresses are reserved, and no memory is there for it");
        let allocated = meter.times.iter().filter(|(key, _)| key.operation == Operation::Alloc).count();
        assert_eq!(allocated, 3);
        let left_out = ["plain allocations of 512.00 MiB and more", "physical memory of 512.00 MiB and more"];
        assert_eq!(meter.left_out[..2], left_out.map(|what| format!("the device has no room for {what}")));
        for (operation, pool) in [
            (Operation::AllocAsync, COLD),
            (Operation::FreeAsync, COLD),
            (Operation::AllocAsync, WARM),
            (Operation::FreeAsync, WARM),
        ] {
            let of = |key: &Key| key.operation == operation && key.pool == Some(pool);
            assert_eq!(meter.times.iter().filter(|(key, _)| of(key)).count(), 3, "{operation:?} {pool}");
        }
        assert!(meter.times.iter().all(|(key, times)| times.len() == 1 && key.pool.is_none_or(|_| key.mappings == 0)));
        let free = meter.device.memory_info().unwrap();
        assert_eq!(free.free, free.total);
    }
}
