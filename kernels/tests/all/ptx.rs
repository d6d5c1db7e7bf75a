//! The declarations agree with the PTX.

use std::collections::BTreeMap;

use aquifer_kernels::{KERNELS, KernelParam, Module};

/// The entries of PTX text, with the types of their parameters.
fn entries(ptx: &str) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for entry in ptx.split(".visible .entry ").skip(1) {
        let (name, rest) = entry.split_once('(').unwrap();
        let (params, _) = rest.split_once(')').unwrap();
        let types = params.split(',').map(str::trim).filter(|param| !param.is_empty()).map(|param| {
            let words: Vec<_> = param.split_whitespace().collect();
            assert_eq!((words.len(), words[0]), (3, ".param"), "{param}");
            words[1].to_owned()
        });
        assert!(found.insert(name.to_owned(), types.collect()).is_none(), "{name} twice");
    }
    found
}

fn type_of(param: KernelParam) -> &'static str {
    match param {
        KernelParam::Ptr | KernelParam::U64 => ".u64",
        KernelParam::U32 => ".u32",
        KernelParam::F32 => ".f32",
        KernelParam::F64 => ".f64",
        other => panic!("{other:?} is new here"),
    }
}

#[test]
fn every_kernel_has_an_entry_with_its_parameters_and_every_entry_a_kernel() {
    for &module in Module::ALL {
        let mut entries = entries(module.ptx());
        for kernel in KERNELS.iter().filter(|kernel| kernel.module == module) {
            let types = entries.remove(kernel.name).unwrap_or_else(|| panic!("{} has no entry", kernel.name));
            let declared: Vec<_> = kernel.params.iter().map(|&param| type_of(param)).collect();
            assert_eq!(types, declared, "{}", kernel.name);
        }
        assert!(entries.is_empty(), "{}: entries without a kernel: {:?}", module.name(), entries.keys());
    }
}

#[test]
fn drivers_from_cuda_12_2_on_and_devices_from_7_5_on_take_it() {
    for module in Module::ALL {
        let words: Vec<_> = module.ptx().lines().filter(|line| !line.starts_with("//")).collect();
        assert!(words.contains(&".version 8.2"), "{}", module.name());
        assert!(words.contains(&".target sm_75"), "{}", module.name());
        assert!(words.contains(&".address_size 64"), "{}", module.name());
    }
}

#[test]
fn names_are_unique_and_found() {
    for (index, kernel) in KERNELS.iter().enumerate() {
        assert!(KERNELS[..index].iter().all(|other| other.name != kernel.name), "{} twice", kernel.name);
        assert!(std::ptr::eq(aquifer_kernels::find(kernel.name).unwrap(), kernel));
    }
    assert_eq!(KERNELS.len(), 96);
}
