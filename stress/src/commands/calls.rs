//! `calls`: the cost of driver calls on this device: measured on a real device, from the
//! simulator's cost model on a simulated one.

use std::sync::Arc;
use std::time::Instant;

use aquifer::Device;
use aquifer::device::sim::SimDriver;
use aquifer::device::{DeviceError, DevicePtr, ErrorKind, StreamFlags};
use aquifer_device::{Driver, Operation, PhysicalOptions, RawPhysical};
use serde::Serialize;

use crate::cli::CallsArgs;
use crate::commands::{hundredths, kind_of_time};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::table::{Column, table};
use crate::text::Bytes;

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

/// A row of results. `calls --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub device: String,
    pub device_name: String,
    pub call: &'static str,
    pub bytes: u64,
    pub mappings: u64,
    pub pool: Option<&'static str>,
    pub rounds: u32,
    pub median_us: f64,
    pub p95_us: f64,
    pub modelled: bool,
}

/// A row of kvcached's `bench_vmm`, with its figures. `calls --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct PagesRow {
    benchmark: &'static str,
    device: String,
    device_name: String,
    call: &'static str,
    bytes: u64,
    pages: u64,
    avg_us: f64,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    max_us: f64,
    modelled: bool,
}

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, a call fails for another reason than lack of memory, or
/// standard output cannot be written.
pub fn run(session: &Session, args: &CallsArgs) -> Result<Outcome, Failure> {
    session.without_allocator();
    let (device, simulated) = session.open_with_simulator()?;
    let mut meter = Meter { device, simulated, times: Vec::new(), left_out: Vec::new() };
    let pages = meter.pages()?;
    let pages = meter.rows_of_pages(session, pages);
    for round in 0..args.rounds.saturating_add(1) {
        // The first round warms the driver up.
        if round == 1 {
            meter.times.clear();
        }
        meter.plain_memory()?;
        meter.mapped_memory()?;
        meter.mappings()?;
        meter.order()?;
    }
    let rows = meter.rows(session);
    rows.iter().try_for_each(|row| session.row(row))?;
    let columns: [Column<Row>; 7] = [
        ("call", |row| row.call.to_owned()),
        ("bytes", |row| if row.bytes > 0 { Bytes(row.bytes).to_string() } else { String::new() }),
        ("mappings", |row| if row.mappings > 0 { row.mappings.to_string() } else { String::new() }),
        ("pool", |row| row.pool.unwrap_or_default().to_owned()),
        ("median µs", |row| format!("{:.2}", row.median_us)),
        ("95 % below µs", |row| format!("{:.2}", row.p95_us)),
        ("times", |row| kind_of_time(row.modelled)),
    ];
    session.show(table(&rows, 1, &columns))?;
    if let Some(first) = pages.first() {
        let (count, of, all) = (first.pages, Bytes(first.bytes), Bytes(first.pages * first.bytes));
        session.show(format_args!("\nAs kvcached's bench_vmm: {count} pages of {of} in {all} of addresses"))?;
        pages.iter().try_for_each(|row| session.row(row))?;
        let columns: [Column<PagesRow>; 7] = [
            ("call", |row| row.call.to_owned()),
            ("avg µs", |row| format!("{:.2}", row.avg_us)),
            ("p50 µs", |row| format!("{:.2}", row.p50_us)),
            ("p90 µs", |row| format!("{:.2}", row.p90_us)),
            ("p99 µs", |row| format!("{:.2}", row.p99_us)),
            ("max µs", |row| format!("{:.2}", row.max_us)),
            ("times", |row| kind_of_time(row.modelled)),
        ];
        session.show(table(&pages, 1, &columns))?;
    }
    meter.left_out.iter().for_each(|left_out| session.message(format_args!("note: {left_out}")));
    Ok(Outcome::Done)
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

    /// What was measured of each page.
    fn rows_of_pages(&self, session: &Session, pages: u64) -> Vec<PagesRow> {
        let row = |(key, times): &(Key, Vec<u64>)| {
            let sorted = Sorted::new(times);
            PagesRow {
                benchmark: "bench_vmm",
                device: session.device_text().to_owned(),
                device_name: self.device.info().name.clone(),
                call: key.operation.name(),
                bytes: key.bytes,
                pages,
                avg_us: sorted.mean(),
                p50_us: sorted.at(50),
                p90_us: sorted.at(90),
                p99_us: sorted.at(99),
                max_us: sorted.at(100),
                modelled: self.simulated.is_some(),
            }
        };
        self.times.iter().filter(|(key, _)| key.operation != Operation::Reserve).map(row).collect()
    }

    fn rows(&self, session: &Session) -> Vec<Row> {
        let row = |(key, times): &(Key, Vec<u64>)| {
            let sorted = Sorted::new(times);
            Row {
                device: session.device_text().to_owned(),
                device_name: self.device.info().name.clone(),
                call: key.operation.name(),
                bytes: key.bytes,
                mappings: key.mappings,
                pool: key.pool,
                rounds: u32::try_from(times.len()).unwrap_or(u32::MAX),
                median_us: sorted.at(50),
                p95_us: sorted.at(95),
                modelled: self.simulated.is_some(),
            }
        };
        self.times.iter().map(row).collect()
    }
}

/// Times in order, to be shown in µs.
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
        self.0.get(last * percent / 100).map_or(0.0, |&ns| hundredths(ns as f64 / 1e3))
    }

    fn mean(&self) -> f64 {
        hundredths(self.0.iter().sum::<u64>() as f64 / 1e3 / self.0.len().max(1) as f64)
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
    use super::*;
    use crate::cli::Global;

    fn meter(device: &str) -> Meter {
        let global = Global { device: Some(device.parse().unwrap()), ..Global::default() };
        let (device, simulated) = Session::new(&global).unwrap().open_with_simulator().unwrap();
        Meter { device, simulated, times: Vec::new(), left_out: Vec::new() }
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
