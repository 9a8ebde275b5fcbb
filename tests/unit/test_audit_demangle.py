"""Missing symbols are told by the names that people search for."""

from __future__ import annotations

import pytest

from fleet.audit.demangle import demangle


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (
            "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb",
            "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, unsigned int, bool)",
        ),
        ("_ZN5torch7LibraryD1Ev", "torch::Library::~Library()"),
        (
            "_ZN5torch7Library4_defEON3c106either"
            "INS1_12OperatorNameENS1_14FunctionSchemaEEEONS_11CppFunctionENS0_11_RegisterOrE",
            "torch::Library::_def(c10::either<c10::OperatorName, c10::FunctionSchema>&&, torch::CppFunction&&, "
            "torch::Library::_RegisterOr)",
        ),
        ("_ZNK2at10TensorBase8data_ptrIfEEPT_v", "float* at::TensorBase::data_ptr<float>() const"),
        ("_ZN2at10TensorBaseC2ERKS0_", "at::TensorBase::TensorBase(at::TensorBase const&)"),
        ("_ZTIN3c105ErrorE", "typeinfo for c10::Error"),
        ("_ZTVN5torch8autograd12AutogradMetaE", "vtable for torch::autograd::AutogradMeta"),
        ("_ZN3c10lsERSoNS_10DeviceTypeE", "c10::operator<<(std::ostream&, c10::DeviceType)"),
        (
            "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs",
            "c10::detail::torchCheckFail(char const*, char const*, unsigned int, std::string const&)",
        ),
        (
            "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
            "c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char, std::char_traits<char>, "
            "std::allocator<char>>)",
        ),
        ("_ZN2at4_ops5empty4callEN3c108ArrayRefINS2_6SymIntEEE", "at::_ops::empty::call(c10::ArrayRef<c10::SymInt>)"),
        ("_Z3addILi128ELb1EEvSt5arrayIhLm4EE", "void add<128, true>(std::array<unsigned char, 4ul>)"),
        ("_ZN3c104impl8registerEPFvPNS_6DeviceEE", "c10::impl::register(void (*)(c10::Device*))"),
    ],
)
def test_names_are_readable(symbol: str, name: str) -> None:
    assert demangle(symbol) == name


@pytest.mark.parametrize(
    "symbol",
    ["", "malloc", "_Z1fiE", "_Z", "_ZN", "_ZN3c10", "_ZN99c10E", "_ZNS_E", "_ZTT", "_Z1fS9_", "_Z" + "P" * 500 + "i"],
)
def test_what_cannot_be_read_comes_back_as_it_is(symbol: str) -> None:
    assert demangle(symbol) == symbol
