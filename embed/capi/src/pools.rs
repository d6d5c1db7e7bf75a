//! Private pools by number, for PyTorch's `MemPool` and for graphs.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquifer::Stream;
use aquifer::device::DevicePtr;
use aquifer::memory::{Contents, Part, PoolOptions, PrivatePool, SleepOptions};
use aquifer_device::AnnouncedCapture;

use crate::failure::Failure;
use crate::gpu::Gpu;

struct Pool {
    gpu: &'static Gpu,
    pool: PrivatePool,
}

/// The captures that allocate from pools: their streams, and announcements. Not with the pools, which
/// one capture may outlive.
static CAPTURES: Mutex<Vec<(Stream, AnnouncedCapture)>> = Mutex::new(Vec::new());

/// The captures, locked.
fn captures() -> MutexGuard<'static, Vec<(Stream, AnnouncedCapture)>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

static POOLS: Mutex<BTreeMap<u64, Arc<Pool>>> = Mutex::new(BTreeMap::new());

/// The pools, locked.
fn pools() -> MutexGuard<'static, BTreeMap<u64, Arc<Pool>>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(number: u64) -> Result<Arc<Pool>, Failure> {
    pools().get(&number).cloned().ok_or_else(|| unknown(number))
}

fn unknown(number: u64) -> Failure {
    Failure::invalid(format!("{number} is not the number of a pool"))
}

pub(crate) fn create(gpu: &'static Gpu, options: PoolOptions) -> Result<u64, Failure> {
    let pool = gpu.memory.create_pool(options)?;
    let number = pool.id().1;
    pools().insert(number, Arc::new(Pool { gpu, pool }));
    Ok(number)
}

pub(crate) fn alloc(number: u64, bytes: u64, stream: *mut c_void) -> Result<DevicePtr, Failure> {
    let Pool { gpu, pool } = &*find(number)?;
    gpu.with_stream(stream, |stream| {
        if !stream.is_capturing()
            && let Ok(announced) = stream.announce_capture()
        {
            captures().push((stream.clone(), announced));
        }
        pool.alloc_raw(bytes, stream)
    })?
    .map_err(Failure::from)
}

pub(crate) fn end_captures(number: u64) -> Result<(), Failure> {
    find(number)?;
    forget_ended_captures();
    Ok(())
}

/// Ends the announcements of captures that have ended. Others may go on.
fn forget_ended_captures() {
    let all = std::mem::take(&mut *captures());
    // Asks the driver.
    let goes_on = |(stream, _): &(Stream, _)| stream.end_abandoned_captures().is_err() || stream.is_capturing();
    let going_on: Vec<_> = all.into_iter().filter(goes_on).collect();
    captures().extend(going_on);
}

thread_local! {
    /// The captures for which this thread allocates from a pool, by stream, innermost last.
    static GRAPHS: RefCell<Vec<(usize, Box<dyn Any>)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn begin_graph(number: u64, stream: *mut c_void) -> Result<(), Failure> {
    let Pool { gpu, pool, .. } = &*find(number)?;
    if graphs(|graphs| graphs.iter().any(|(of, _)| *of == stream.addr()))? {
        return Err(Failure::invalid("this thread began a graph on the stream already: call aquifer_graph_end first"));
    }
    let route = gpu.with_stream(stream, |stream| gpu.memory.capture(stream, pool))??;
    graphs(|graphs| graphs.push((stream.addr(), Box::new(route))))
}

/// Calls `work` with the captures for which this thread allocates.
fn graphs<R>(work: impl FnOnce(&mut Vec<(usize, Box<dyn Any>)>) -> R) -> Result<R, Failure> {
    let done = GRAPHS.try_with(|graphs| work(&mut graphs.borrow_mut()));
    done.map_err(|_| Failure::invalid("the thread is ending: begin and end graphs before"))
}

pub(crate) fn end_graph(stream: *mut c_void) -> Result<(), Failure> {
    let ended = graphs(|graphs| {
        let at = graphs.iter().position(|(of, _)| *of == stream.addr())?;
        Some(graphs.remove(at))
    })?;
    // Dropped outside of the borrow, as it may call the driver.
    ended.map(drop).ok_or_else(|| Failure::invalid("this thread began no graph on the stream"))
}

pub(crate) fn release(number: u64) -> Result<(), Failure> {
    // Dropped without the lock, as it may call the driver.
    let pool = pools().remove(&number);
    forget_ended_captures();
    pool.map(drop).ok_or_else(|| unknown(number))
}

pub(crate) fn sleep(number: u64, contents: Contents) -> Result<(), Failure> {
    let Pool { gpu, pool, .. } = &*find(number)?;
    Ok(gpu.memory.sleep(SleepOptions::part(Part::pool(pool), contents)).map(drop)?)
}

pub(crate) fn wake(number: u64) -> Result<(), Failure> {
    let Pool { gpu, pool, .. } = &*find(number)?;
    Ok(gpu.memory.wake_parts(&[Part::pool(pool)])?)
}
