//! NVIDIA's management library (NVML), as far as it attributes a device's memory to processes. A
//! program finds it here through `AQUIFER_NVML_LIBRARY`.

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;

use aquifer_device::{Code, Driver as _};

use crate::abi::{Answer, Call, Handle, InOut, Out, abi, needed, string};
use crate::devices;
use crate::process::{Life, Process};

/// The process that holds what this one does not: an id that Linux gives to none.
pub const OTHER_PID: u32 = (1 << 22) + 1;

/// Bytes of each device that the driver reserves. CUDA does not count them.
pub const RESERVED: u64 = 512 << 20;

/// Codes of NVML.
const NOT_FOUND: Code = Code(6);
const INSUFFICIENT_SIZE: Code = Code(7);

/// `nvmlProcessInfo_t`. All bits are set where an instance or a number of bytes is not known.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct Memory {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// Finds a device by its id, whose end is the ordinal.
fn by_uuid(call: &Call, text: &str) -> Answer<i32> {
    let digits = text.strip_prefix("GPU-").ok_or(NOT_FOUND)?.replace('-', "");
    let id = u128::from_str_radix(&digits, 16).map_err(|_| NOT_FOUND)?;
    let ordinal = i32::try_from(id & u128::from(u32::MAX)).map_err(|_| NOT_FOUND)?;
    let device = call.device(ordinal).map_err(|_| NOT_FOUND)?;
    if devices::uuid(&device) == id.to_be_bytes() { Ok(ordinal) } else { Err(NOT_FOUND) }
}

/// What a handle of NVML stands for.
fn life(call: &Call, device: Handle) -> Answer<Arc<Life>> {
    let life = call.device(i32::try_from(device).unwrap_or(0) - 1)?.life();
    life.count(call.name());
    Ok(life)
}

/// Lists the other process and, if wanted, this one.
///
/// # Safety
/// `infos` must be null or writable for `count` entries.
unsafe fn list(life: &Life, count: InOut<'_, u32>, infos: *mut ProcessInfo, with_own: bool) -> Answer {
    let users = life.sim.memory_users();
    let own = Process::get().environment().ok().map(|environment| environment.pid).filter(|_| with_own);
    let own = own.map(|pid| (pid, users.own.unwrap_or(0)));
    let others = users.others.iter().map(|other| (OTHER_PID, other.bytes));
    let found: Vec<_> = own
        .into_iter()
        .chain(others)
        .map(|(pid, used)| ProcessInfo { pid, used, gpu_instance: u32::MAX, compute_instance: u32::MAX })
        .collect();
    let count = needed(count)?;
    let room = *count as usize;
    *count = u32::try_from(found.len()).unwrap_or(u32::MAX);
    if found.is_empty() {
        return Ok(());
    }
    if infos.is_null() || room < found.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: there is room, which the caller vouches for.
    unsafe { ptr::copy_nonoverlapping(found.as_ptr(), infos, found.len()) };
    Ok(())
}

abi! {
    /// Starts the library.
    4000 nvmlInit_v2(_call) {
        Ok(())
    }

    /// Ends what `nvmlInit_v2` began.
    4000 nvmlShutdown(_call) {
        Ok(())
    }

    /// A device by its id, such as `GPU-61717569-6665-722d-7374-616e00000000`.
    4000 nvmlDeviceGetHandleByUUID(call, uuid: *const c_char, device: Out<'_, Handle>) {
        // SAFETY: the caller vouches for the text.
        let ordinal = by_uuid(call, unsafe { string(uuid) }?)?;
        // A handle is not null.
        needed(device)?.write(u64::from(ordinal.unsigned_abs()) + 1);
        Ok(())
    }

    /// Processes that use a device through CUDA: this one and the other one.
    11060 nvmlDeviceGetComputeRunningProcesses_v3(
        call, device: Handle, count: InOut<'_, u32>, infos: *mut ProcessInfo,
    ) {
        // SAFETY: the caller vouches for the entries.
        unsafe { list(&*life(call, device)?, count, infos, true) }
    }

    /// Processes that use a device for graphics: the other one does that, too.
    11060 nvmlDeviceGetGraphicsRunningProcesses_v3(
        call, device: Handle, count: InOut<'_, u32>, infos: *mut ProcessInfo,
    ) {
        // SAFETY: the caller vouches for the entries.
        unsafe { list(&*life(call, device)?, count, infos, false) }
    }

    /// The memory of a device, and what the driver reserves of it.
    11060 nvmlDeviceGetMemoryInfo_v2(call, device: Handle, memory: InOut<'_, Memory>) {
        let sim = &life(call, device)?.sim;
        let memory = needed(memory)?;
        let (users, total) = (sim.memory_users(), sim.info().total_bytes);
        let used = users.own.unwrap_or(0) + users.others.iter().map(|other| other.bytes).sum::<u64>();
        *memory = Memory {
            version: memory.version,
            total: total + RESERVED,
            reserved: RESERVED,
            free: total.saturating_sub(used),
            used,
        };
        Ok(())
    }
}
