//! Starting the driver, and facts about devices. None of it needs a context.

use std::ffi::{c_char, c_void};

use aquifer_device::{Attribute, Code, Driver as _};

use crate::abi::{Answer, Out, abi, check_flags, code, needed, string, write_text};
use crate::exports;
use crate::process::{Device, Process};

/// The largest attribute that the bindings of 12.8 know.
const ATTRIBUTE_MAX: i32 = 144;

/// Facts that are the same for all cards that can be simulated: attribute, value.
///
/// Source: the table of technical specifications in the CUDA C++ programming guide.
const FIXED: &[(i32, i32)] = &[
    (1, 1024), // threads of a block
    (2, 1024), // extents of a block
    (3, 1024),
    (4, 64),
    (5, i32::MAX), // extents of a grid
    (6, 65535),
    (7, 65535),
    (8, 48 << 10),   // shared memory of a block
    (9, 64 << 10),   // constant memory
    (10, 32),        // threads of a warp
    (11, i32::MAX),  // pitch of a copy
    (12, 65536),     // registers of a block
    (14, 512),       // alignment of textures
    (15, 1),         // copies concurrent with kernels
    (31, 1),         // concurrent kernels
    (39, 2048),      // threads of a multiprocessor
    (41, 1),         // one address space for host and devices
    (78, 1),         // stream priorities
    (82, 65536),     // registers of a multiprocessor
    (91, 0),         // registered host memory has a device address of its own
    (97, 227 << 10), // shared memory of a block that asks for it
    (99, 1),         // host memory can be registered
];

/// Attributes that the simulated device knows.
fn simulated(attribute: i32) -> Option<Attribute> {
    Some(match attribute {
        16 => Attribute::MultiprocessorCount,
        40 => Attribute::AsyncEngineCount,
        75 => Attribute::ComputeCapabilityMajor,
        76 => Attribute::ComputeCapabilityMinor,
        102 => Attribute::VirtualMemoryManagement,
        103 => Attribute::PosixFdHandles,
        110 => Attribute::GpuDirectRdmaWithVmm,
        115 => Attribute::MemoryPools,
        _ => return None,
    })
}

/// A device's name. It says that it is none: "simulated H100 24 GiB (stand-in driver)".
pub(crate) fn name(device: &Device) -> String {
    let life = device.life();
    let name = &life.sim.info().name;
    format!("simulated {} (stand-in driver)", name.trim_start_matches("Simulated "))
}

pub(crate) fn uuid(device: &Device) -> [u8; 16] {
    let mut uuid = *b"aquifer-stand-in";
    uuid[12..].copy_from_slice(&device.ordinal.to_be_bytes());
    uuid
}

/// Finds a function by its symbol or, without a version suffix, the newest one that a program of
/// `version` may know.
fn address(name: &str, version: i32) -> Result<u64, Missing> {
    let process = Process::get();
    let Ok(environment) = process.environment() else { return Err(Missing::Unknown) };
    let asked = u32::try_from(version).unwrap_or(0);
    let exported = |entry: &&crate::abi::Entry| {
        entry.since <= environment.version && !environment.without.iter().any(|without| without == entry.name)
    };
    let all = exports::all().filter(|entry| exports::base(entry.name) == name || entry.name == name);
    let present: Vec<_> = all.filter(exported).collect();
    if present.is_empty() {
        return Err(Missing::Unknown);
    }
    let newest = present.into_iter().filter(|entry| entry.since <= asked).max_by_key(|entry| entry.since);
    newest.map(|entry| (entry.address)()).ok_or(Missing::TooNew)
}

/// Why there is no address.
enum Missing {
    /// There is no such function.
    Unknown,
    /// It is newer than the version asked for.
    TooNew,
}

fn proc_address(symbol: &str, out: Out<'_, *mut c_void>, version: i32, flags: u64, status: Out<'_, u32>) -> Answer {
    let out = needed(out)?;
    // 1 asks for the legacy stream where none is named, which is what all functions here do.
    if flags > 1 {
        return Err(Code::NOT_SUPPORTED);
    }
    let found = address(symbol, version);
    let state = match found {
        Ok(_) => 0,
        Err(Missing::Unknown) => 1,
        Err(Missing::TooNew) => 2,
    };
    if let Some(status) = status {
        status.write(state);
    }
    let address = found.unwrap_or(0);
    out.write(std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0)));
    if address == 0 { Err(crate::abi::NOT_FOUND) } else { Ok(()) }
}

abi! {
    /// Starts the driver: `NO_DEVICE` where the environment has none, `UNKNOWN` (and why, on
    /// standard error) where it is wrong.
    2000 cuInit(_call, flags: u32) {
        check_flags(flags, 0)?;
        Process::get().start()
    }

    /// The CUDA version that the driver claims.
    2020 cuDriverGetVersion(_call, version: Out<'_, i32>) {
        let claimed = Process::get().environment().map_or(0, |environment| environment.version);
        needed(version)?.write(i32::try_from(claimed).unwrap_or(0));
        Ok(())
    }

    /// An older shape of `cuGetProcAddress_v2`.
    11030 cuGetProcAddress(
        _call, symbol: *const c_char, function: Out<'_, *mut c_void>, version: i32, flags: u64,
    ) {
        // SAFETY: the caller vouches for the symbol.
        let symbol = unsafe { string(symbol) }?;
        proc_address(symbol, function, version, flags, None)
    }

    /// A function by its name without a version suffix, as a program built for `version` expects
    /// it.
    12000 cuGetProcAddress_v2(
        _call, symbol: *const c_char, function: Out<'_, *mut c_void>, version: i32, flags: u64, status: Out<'_, u32>,
    ) {
        // SAFETY: the caller vouches for the symbol.
        let symbol = unsafe { string(symbol) }?;
        proc_address(symbol, function, version, flags, status)
    }

    /// How many devices the environment has.
    2000 cuDeviceGetCount(call, count: Out<'_, i32>) {
        let process = call.process()?;
        needed(count)?.write(i32::try_from(process.device_count()).unwrap_or(i32::MAX));
        Ok(())
    }

    /// A device by ordinal. The handle is the ordinal.
    2000 cuDeviceGet(call, device: Out<'_, i32>, ordinal: i32) {
        call.device(ordinal)?;
        needed(device)?.write(ordinal);
        Ok(())
    }

    /// The device's name, cut to fit.
    2000 cuDeviceGetName(call, text: *mut c_char, capacity: i32, device: i32) {
        let device = call.device(device)?;
        let capacity = usize::try_from(capacity).map_err(|_| Code::INVALID_VALUE)?;
        if text.is_null() || capacity == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller vouches for the buffer.
        unsafe { write_text(text, capacity, &name(&device)) };
        Ok(())
    }

    /// An identity that is the device's own in this process.
    9020 cuDeviceGetUuid(call, out: Out<'_, [u8; 16]>, device: i32) {
        needed(out)?.write(uuid(&*call.device(device)?));
        Ok(())
    }

    /// As `cuDeviceGetUuid`: there are no parts of devices here.
    11040 cuDeviceGetUuid_v2(call, out: Out<'_, [u8; 16]>, device: i32) {
        needed(out)?.write(uuid(&*call.device(device)?));
        Ok(())
    }

    /// Memory of the device in bytes.
    3020 cuDeviceTotalMem_v2(call, bytes: Out<'_, u64>, device: i32) {
        needed(bytes)?.write(call.device(device)?.life().sim.info().total_bytes);
        Ok(())
    }

    /// A numeric fact. Those that the stand-in does not know are 0.
    2000 cuDeviceGetAttribute(call, value: Out<'_, i32>, attribute: i32, device: i32) {
        let life = call.device(device)?.life();
        life.count("cuDeviceGetAttribute");
        let value = needed(value)?;
        if !(1..=ATTRIBUTE_MAX).contains(&attribute) {
            return Err(Code::INVALID_VALUE);
        }
        // Every attribute is a call of the simulated device, so that faults strike all of them.
        let asked = simulated(attribute);
        let answer = life.sim.attribute(asked.unwrap_or(Attribute::MultiprocessorCount)).map_err(code)?;
        let fixed = match attribute {
            18 => life.sim.info().shares_host_memory.into(),
            _ => FIXED.iter().find(|(known, _)| *known == attribute).map_or(0, |&(_, value)| value),
        };
        value.write(if asked.is_some() { i32::try_from(answer).unwrap_or(i32::MAX) } else { fixed });
        Ok(())
    }

    /// Whether mappings of one device's memory may be made accessible to another one.
    4000 cuDeviceCanAccessPeer(call, can: Out<'_, i32>, device: i32, peer: i32) {
        let life = call.device(device)?.life();
        let peer = call.device(peer)?.ordinal;
        life.count("cuDeviceCanAccessPeer");
        needed(can)?.write(life.sim.can_access_peer(peer).map_err(code)?.into());
        Ok(())
    }
}
