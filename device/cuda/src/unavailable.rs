//! The reasons why no real GPU can be used, with advice.

use aquifer_device::{Code, DeviceError, ErrorKind, Operation, fork};

/// Why no real GPU can be used. Formatting it asks no driver.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// There is no driver on this machine.
    #[error(
        "no CUDA driver was found: {reason}. Install NVIDIA's display driver (no CUDA toolkit is needed; in a \
         container, start it with access to the GPU)"
    )]
    NoDriver {
        /// The answer of the system's loader for each name that was tried.
        reason: String,
    },
    /// The library found is a toolkit's stub, which exists for linking and drives nothing.
    #[error(
        "the CUDA driver that was found is the stub of a toolkit, which drives nothing: take the toolkit's folder \
         `stubs` off the library path (LD_LIBRARY_PATH), or install NVIDIA's display driver"
    )]
    Stub,
    /// The driver is older than anything that works.
    #[error(
        "the CUDA driver is too old: it supports CUDA {}, and CUDA {} is needed. Install a newer driver",
        version(*.supported), version(*.needed)
    )]
    TooOld {
        /// The newest CUDA version that it supports, major and minor number.
        supported: (u32, u32),
        /// The oldest that will do.
        needed: (u32, u32),
    },
    /// The driver lacks a function without which nothing works.
    #[error(
        "the CUDA driver{} lacks {symbol}, so it is broken or no CUDA driver at all. Install NVIDIA's display driver \
         again",
        of_version(*.version)
    )]
    MissingSymbol {
        /// Name of the function.
        symbol: &'static str,
        /// The newest CUDA version that it supports, if it could be asked.
        version: Option<(u32, u32)>,
    },
    /// The driver sees no GPU.
    #[error("the CUDA driver sees no GPU on this machine")]
    NoDevice,
    /// The environment hides every GPU.
    #[error("CUDA_VISIBLE_DEVICES={value:?} hides every GPU from this program; change or unset it")]
    Hidden {
        /// Value of `CUDA_VISIBLE_DEVICES`.
        value: String,
    },
    /// This process was forked from one that had opened a device.
    #[error("{}", fork::ADVICE)]
    Forked,
    /// The driver is there and refuses to start.
    #[error("the CUDA driver does not start: {} ({}){}", code.name(), code.0, advice(*code))]
    Failed {
        /// The code that `cuInit` returned.
        code: Code,
    },
}

aquifer_device::debug_as_display!(Unavailable);

/// Advice for a driver that refuses to start.
fn advice(code: Code) -> &'static str {
    match code.0 {
        46 => "; another process holds the GPU for itself",
        802 => "; a service that it needs is not running, such as NVIDIA's fabric manager",
        803 => "; its library and its kernel module are of different versions: restart the machine",
        804 => "; its compatibility library does not support this GPU: use the driver's own",
        999 => "; its kernel modules may not be loaded (nvidia, nvidia-uvm), or may need the machine to be restarted",
        _ => "",
    }
}

/// A CUDA version in the usual notation.
fn version((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

fn of_version(known: Option<(u32, u32)>) -> String {
    known.map_or_else(String::new, |known| format!(" (for CUDA {})", version(known)))
}

impl Unavailable {
    /// The driver's code that says the same, or comes nearest.
    fn code(&self) -> Code {
        match self {
            Unavailable::NoDriver { .. } | Unavailable::TooOld { .. } | Unavailable::Forked => Code(3),
            Unavailable::Stub => Code(34),
            Unavailable::MissingSymbol { .. } => Code(500),
            Unavailable::NoDevice | Unavailable::Hidden { .. } => Code::NO_DEVICE,
            Unavailable::Failed { code } => *code,
        }
    }
}

impl From<Unavailable> for DeviceError {
    fn from(unavailable: Unavailable) -> DeviceError {
        DeviceError::refused(Operation::Init, unavailable.code())
            .of_request("no GPU was opened")
            .with_kind(if unavailable == Unavailable::Forked { ErrorKind::Forked } else { ErrorKind::Unavailable })
            .with_detail(unavailable.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_comes_with_advice() {
        let texts = [
            (Unavailable::NoDriver { reason: "libcuda.so.1: not found".to_owned() }, "libcuda.so.1: not found"),
            (Unavailable::Stub, "stubs"),
            (
                Unavailable::TooOld { supported: (11, 2), needed: (11, 4) },
                "supports CUDA 11.2, and CUDA 11.4 is needed",
            ),
            (Unavailable::MissingSymbol { symbol: "cuInit", version: None }, "the CUDA driver lacks cuInit"),
            (Unavailable::MissingSymbol { symbol: "cuInit", version: Some((12, 8)) }, "(for CUDA 12.8) lacks cuInit"),
            (Unavailable::NoDevice, "no GPU"),
            (Unavailable::Hidden { value: "-1".to_owned() }, "CUDA_VISIBLE_DEVICES=\"-1\""),
        ];
        for (unavailable, text) in texts {
            let said = unavailable.to_string();
            assert!(said.contains(text), "{said}");
            let error = DeviceError::from(unavailable);
            assert_eq!((error.operation, error.kind), (Operation::Init, ErrorKind::Unavailable));
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_driver_that_does_not_start_comes_with_advice() {
        for code in [46, 802, 803, 804, 999] {
            assert!(!advice(Code(code)).is_empty());
        }
        let said = Unavailable::Failed { code: Code(803) }.to_string();
        assert!(said.contains("SYSTEM_DRIVER_MISMATCH (803); its library"), "{said}");
        assert_eq!(advice(Code(1)), "");
    }
}
