"""Every domain passes the conformance suite; then what is special about each of them."""

from envserver.domains import load_domain
from envserver.testing import DomainConformance


class TestFrozenLake(DomainConformance):
    def make_domain(self):
        return load_domain("frozenlake")


class TestArithmetic(DomainConformance):
    def make_domain(self):
        return load_domain("arithmetic")
